"""The connections that network policies allow, by the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from tests.deploy.manifests import Object, selects

NAMESPACE = "specrej"


@dataclass(frozen=True)
class Peer:
    """A pod, or without a namespace an address outside the cluster's pods."""

    name: str
    namespace: str
    labels: tuple[tuple[str, str], ...] = ()
    address: str = ""


Port = tuple[str, int]  # protocol and number
Edge = tuple[str, str, Port]


def edges(policies: Iterable[Object], peers: Iterable[Peer], ports: Iterable[Port]) -> set[Edge]:
    """Return allowed (source, target, port) edges with source or target in our namespace."""
    policies, peers, ports = list(policies), list(peers), list(ports)
    rules = {
        (way, peer): _rules(policies, way, peer) for way in ("egress", "ingress") for peer in peers
    }
    return {
        (source.name, target.name, port)
        for source in peers
        for target in peers
        for port in ports
        if source != target
        and NAMESPACE in (source.namespace, target.namespace)
        and _allowed(rules["egress", source], "egress", target, port)
        and _allowed(rules["ingress", target], "ingress", source, port)
    }


def _rules(policies: list[Object], way: str, own: Peer) -> list[Object] | None:
    """The rules of all policies that select a pod; None: there is none, so all is allowed."""
    if own.namespace != NAMESPACE:
        return None
    of_own = [
        policy["spec"]
        for policy in policies
        if way.capitalize() in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], dict(own.labels))
    ]
    return [rule for spec in of_own for rule in spec.get(way) or ()] if of_own else None


def _allowed(rules: list[Object] | None, way: str, other: Peer, port: Port) -> bool:
    return rules is None or any(_rule_allows(rule, way, other, port) for rule in rules)


def _rule_allows(rule: Mapping[str, Any], way: str, other: Peer, port: Port) -> bool:
    sides = rule["to" if way == "egress" else "from"]
    ports = [(allowed["protocol"], allowed["port"]) for allowed in rule.get("ports", ())]
    return any(_matches(side, other) for side in sides) and (not ports or port in ports)


def _matches(side: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in side:
        cidr = ip_network(side["ipBlock"]["cidr"])
        address = ip_address(peer.address) if peer.address else None
        excluded = (ip_network(block) for block in side["ipBlock"].get("except", ()))
        return address is not None and address in cidr and not any(address in e for e in excluded)
    if not peer.namespace:
        return False
    if "namespaceSelector" in side:
        of_namespace = {"kubernetes.io/metadata.name": peer.namespace}
        in_namespace = selects(side["namespaceSelector"], of_namespace)
    else:
        in_namespace = peer.namespace == NAMESPACE
    return in_namespace and selects(side.get("podSelector", {}), dict(peer.labels))
