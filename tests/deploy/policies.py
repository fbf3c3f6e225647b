"""What network policies let through, worked out as Kubernetes defines it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from tests.deploy.manifests import Object, selects

NAMESPACE = "specrej"


@dataclass(frozen=True)
class Peer:
    """A pod, or with no namespace an address that is no pod's."""

    name: str
    namespace: str
    labels: tuple[tuple[str, str], ...] = ()
    address: str = ""


Port = tuple[str, int]  # protocol and number
Edge = tuple[str, str, Port]


def edges(policies: Iterable[Object], peers: Iterable[Peer], ports: Iterable[Port]) -> set[Edge]:
    """From whom to whom, at which port, with one of the two in our namespace."""
    policies, peers, ports = list(policies), list(peers), list(ports)
    return {
        (source.name, target.name, port)
        for source in peers
        for target in peers
        for port in ports
        if source != target
        and NAMESPACE in (source.namespace, target.namespace)
        and _lets(policies, "egress", source, target, port)
        and _lets(policies, "ingress", target, source, port)
    }


def _lets(policies: list[Object], way: str, own: Peer, other: Peer, port: Port) -> bool:
    """Whoever no policy selects may do anything; else one of them must allow it."""
    if own.namespace != NAMESPACE:
        return True
    of_own = [
        each["spec"]
        for each in policies
        if way.capitalize() in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], dict(own.labels))
    ]
    rules = (rule for spec in of_own for rule in spec.get(way, ()))
    return not of_own or any(_allows(rule, way, other, port) for rule in rules)


def _allows(rule: Mapping[str, Any], way: str, other: Peer, port: Port) -> bool:
    sides = rule["to" if way == "egress" else "from"]
    return any(_is(side, other) for side in sides) and port in _ports(rule)


def _ports(rule: Mapping[str, Any]) -> Iterator[Port]:
    return ((each["protocol"], each["port"]) for each in rule["ports"])


def _is(side: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in side:
        cidr = ip_network(side["ipBlock"]["cidr"])
        return bool(peer.address) and ip_address(peer.address) in cidr
    if not peer.namespace:
        return False
    if "namespaceSelector" in side:
        of_namespace = {"kubernetes.io/metadata.name": peer.namespace}
        there = selects(side["namespaceSelector"], of_namespace)
    else:
        there = peer.namespace == NAMESPACE
    return there and selects(side.get("podSelector", {}), dict(peer.labels))
