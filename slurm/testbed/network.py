"""The bridge, the cables and the network namespaces."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path
from typing import Any

from slurm.testbed.settings import Node, Settings, TestbedError

NAMESPACES = Path("/run/netns")
LINKS = Path("/sys/class/net")


def ip(*arguments: str) -> str:
    """Run ``ip`` and return what it says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise TestbedError(
            f"ip {' '.join(arguments)}: {done.stderr.strip()}; "
            "the testbed needs a machine where root may make network namespaces"
        )
    return done.stdout


def _alias(settings: Settings) -> str:
    return f"rollart-testbed {settings.dir}"


def owner(settings: Settings) -> str | None:
    """Return whose the bridge is: None if there is none, an empty text if it is ours, else a description."""
    link = LINKS / settings.bridge
    if not link.exists():
        return None
    alias = (link / "ifalias").read_text().strip()
    if alias == _alias(settings):
        return ""
    return (
        f"of the testbed in {alias.split()[-1]}"
        if alias.startswith("rollart-testbed ")
        else "of somebody else"
    )


def check_free(settings: Settings) -> None:
    """Raise unless the names and addresses of a testbed are nobody else's."""
    if whose := owner(settings):
        raise TestbedError(
            f"the network link {settings.bridge} is there, {whose}; choose another name with --bridge"
        )
    for entry in json.loads(ip("-json", "-4", "address") or "[]"):
        for address in entry.get("addr_info", []):
            if entry["ifname"] != settings.bridge and _overlaps(settings, address.get("local")):
                _taken(settings, f"the address {address['local']} of {entry['ifname']}")
    for route in json.loads(ip("-json", "-4", "route") or "[]"):
        if route.get("dev") != settings.bridge and _overlaps(settings, route.get("dst")):
            _taken(settings, f"the route to {route['dst']} by {route.get('dev', 'somewhere')}")


def _overlaps(settings: Settings, text: Any) -> bool:
    try:
        return settings.network.overlaps(ipaddress.IPv4Network(str(text), strict=False))
    except ValueError:
        return False  # "default"


def _taken(settings: Settings, by: str) -> None:
    raise TestbedError(
        f"{by} lies in {settings.subnet}; choose another network with --subnet, as 10.78.0.0/24"
    )


def build(settings: Settings) -> None:
    """Make the bridge and, for each node, a namespace with a cable to it."""
    length = settings.network.prefixlen
    ip("link", "add", settings.bridge, "type", "bridge")
    # The first thing to do, since all that comes after is only cleaned up if the bridge is known as ours.
    ip("link", "set", "dev", settings.bridge, "alias", _alias(settings))
    ip("address", "add", f"{settings.head_address}/{length}", "dev", settings.bridge)
    ip("link", "set", settings.bridge, "up")
    for node in settings.nodes:
        inside, cable = settings.namespace(node), settings.link(node)
        ip("netns", "add", inside)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", inside)
        ip("link", "set", cable, "master", settings.bridge, "up")
        ip("-n", inside, "address", "add", f"{settings.address(node)}/{length}", "dev", "eth0")
        ip("-n", inside, "link", "set", "lo", "up")
        ip("-n", inside, "link", "set", "eth0", "up")


def namespaces(bridge: str) -> list[Path]:
    """Return the namespaces that a testbed with this bridge has."""
    return sorted(NAMESPACES.glob(f"{bridge}-*"))


def remove(settings: Settings) -> None:
    """Remove all that ``build`` made, as much as is there."""
    for link in sorted(LINKS.glob(f"{settings.bridge}-*")):
        ip("link", "delete", link.name)
    if owner(settings) == "":
        ip("link", "delete", settings.bridge)
    for namespace in namespaces(settings.bridge):
        ip("netns", "delete", namespace.name)


def namespace_path(settings: Settings, node: Node) -> Path:
    return NAMESPACES / settings.namespace(node)


def plugged(settings: Settings, node: Node) -> bool:
    """Say whether the node's cable is there and up."""
    try:
        flags = int((LINKS / settings.link(node) / "flags").read_text(), 16)
    except OSError:
        return False
    return bool(flags & 1)


def plug(settings: Settings, node: Node, up: bool) -> None:
    ip("link", "set", settings.link(node), "up" if up else "down")
