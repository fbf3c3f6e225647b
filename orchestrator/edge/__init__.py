"""The public port: conversion of messages, planning, admission, and serving of requests."""
