"""Starts the worker of a reward's spec: a thread, or calls to another server."""

from __future__ import annotations

from functools import partial

from reward_service.kinds.remote import RemoteWorker
from reward_service.scoring import RewardWorker
from reward_service.specs import RemoteSpec, Resources, RewardSpec
from reward_service.worker import Worker


async def start_worker(
    spec: RewardSpec, resources: Resources, queue_limit: int = 64, merge_s: float = 0.002
) -> RewardWorker:
    """A worker that has loaded the reward, or connected to it, and scored once.

    Raises as `ComputedSpec.load` or `RemoteSpec.connect` does.
    """
    if isinstance(spec, RemoteSpec):
        return await RemoteWorker.start(spec.connect, queue_limit)
    return await Worker.start(partial(spec.load, resources), queue_limit, merge_s)
