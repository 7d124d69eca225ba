"""Hosts as network namespaces, with a cable between each pair that can be pulled one way or both ways.

The process that uses them runs in namespaces of its own (`apart`): when it ends, the kernel ends everything
that it started and removes all hosts and cables.
"""

import subprocess
from dataclasses import dataclass

FRONT = ""  # the host of the process itself
NOWHERE = "02:ff:ff:ff:ff:ff"  # a hardware address that no interface has
AT_MOST = 8  # hosts


def apart() -> list[str] | None:
    """Return a command prefix that gives a process its own network, mounts and process numbers.

    Returns None if this machine does not allow it.
    """
    own = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    for user in ([], ["--user", "--map-root-user"]):
        prefix = ["unshare", *user, *own, "sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh"]
        try:
            tried = subprocess.run([*prefix, "ip", "netns", "add", "tried"], capture_output=True, check=False)
        except FileNotFoundError:
            return None
        if not tried.returncode:
            return prefix
    return None


@dataclass(frozen=True)
class CableEnd:
    """One end of a cable: its host, its interface, and the addresses of the other end."""

    host: str
    interface: str
    peer_ip: str
    peer_mac: str

    def send_to(self, mac: str) -> None:
        """Send all packets to the hardware address `mac`. They are lost silently if no interface has it."""
        neighbour = (self.peer_ip, "lladdr", mac, "dev", self.interface, "nud", "permanent")
        ip(self.host, "neigh", "replace", *neighbour)


class CabledNetwork:
    """Hosts that are connected by cables."""

    def __init__(self, *hosts: str) -> None:
        """Create a namespace for each of these hosts; the host `FRONT` exists already."""
        assert len(hosts) < AT_MOST
        self._hosts = (FRONT, *hosts)
        for host in hosts:
            ip(FRONT, "netns", "add", host)
        for host in self._hosts:
            ip(host, "link", "set", "lo", "up")
            ip(host, "addr", "add", f"{self.address(host)}/32", "dev", "lo")
        self._ends: dict[tuple[str, str], CableEnd] = {}

    def address(self, host: str) -> str:
        return f"10.77.0.{self._hosts.index(host) + 1}"

    def connect(self, one: str, other: str) -> None:
        """Lay a cable between two hosts."""
        ends = [(one, other), (other, one)]
        names = [f"to-{other or 'front'}", f"to-{one or 'front'}"]
        macs = [f"02:00:00:00:{self._hosts.index(a):02x}:{self._hosts.index(b):02x}" for a, b in ends]
        ip(one, "link", "add", "near", "type", "veth", "peer", "name", "far")
        if other != one and other:
            ip(one, "link", "set", "far", "netns", other)
        for (host, peer), name, temporary, mac, peer_mac in zip(
            ends, names, ("near", "far"), macs, reversed(macs), strict=True
        ):
            ip(host, "link", "set", temporary, "name", name, "address", mac)
            ip(host, "link", "set", name, "up")
            peer_ip = self.address(peer)
            ip(host, "route", "add", f"{peer_ip}/32", "dev", name, "src", self.address(host))
            end = self._ends[host, peer] = CableEnd(host, name, peer_ip, peer_mac)
            end.send_to(peer_mac)

    def pull(self, sender: str, receiver: str) -> None:
        """Drop all packets that the host `sender` sends to the host `receiver`."""
        self._ends[sender, receiver].send_to(NOWHERE)

    def links_of(self, host: str) -> list[tuple[str, str]]:
        """Return the pair (sender, receiver) of each link that begins or ends at a host."""
        return [link for link in self._ends if host in link]

    def plug_in(self, sender: str, receiver: str) -> None:
        end = self._ends[sender, receiver]
        end.send_to(end.peer_mac)


def ip(host: str, *arguments: str) -> None:
    """Run the command `ip` with these arguments on a host."""
    within = ["-n", host] if host else []
    done = subprocess.run(["ip", *within, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def on(host: str) -> list[str]:
    """Return a command prefix that runs a process on a host."""
    return ["ip", "netns", "exec", host] if host else []
