"""How much host memory may really be pinned here: machine, cgroups, memlock, NUMA nodes.

Reads ``/proc`` and ``/sys`` below a root that the caller may choose, writes nothing and decides
nothing (``host_demand`` does). What a file does not say is not a limit: a kernel without cgroups
has none.

    machine     MemAvailable; CommitLimit - Committed_AS too where overcommit is refused (mode 2)
    cgroups     of each level from the process's own up to the mount: limit - use + file cache that
                can be dropped (v2: the lower of memory.max and memory.high)
    memlock     RLIMIT_MEMLOCK - VmLck, unless the process has CAP_IPC_LOCK. Whether the driver
                counts pinned pages in it at all, only a trial tells (``cuda.host_memory``)

From machine and cgroups, `RESERVE_BYTES` stay for the process itself and its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hisparse.config import GIB

RESERVE_BYTES = 512 << 20
_CAP_IPC_LOCK = 14
_UNLIMITED = 1 << 60  # cgroup v1 writes "none" as 2^63 less a page

RAISE_MEMLOCK = (
    "raise it with `ulimit -l`, `docker run --ulimit memlock=-1`, LimitMEMLOCK= of the systemd "
    "unit or /etc/security/limits.conf, or grant CAP_IPC_LOCK"
)
_RAISE_CGROUP = (
    "raise it (`docker run --memory`, resources.limits.memory of the pod, MemoryMax= of the "
    "systemd unit)"
)
_RAISE_COMMIT = "set vm.overcommit_memory=0, or raise vm.overcommit_ratio"


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.4g} GiB"


@dataclass(frozen=True)
class Limit:
    """One limit, in bytes: what is left of it, how that comes about, how to raise it."""

    name: str
    left_bytes: int
    because: str
    raise_it: str

    def __str__(self) -> str:
        return f"{self.name} leaves {gib(self.left_bytes)} ({self.because})"


@dataclass(frozen=True)
class HostLimits:
    """What `read_limits` found; `nodes`: bytes free or droppable, of the NUMA nodes that the
    process may use; `memlock` None: unlimited, or not counted for this process."""

    total_bytes: int | None
    machine: tuple[Limit, ...]
    cgroups: tuple[Limit, ...]
    memlock: Limit | None
    nodes: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        limits = [*self.machine, *self.cgroups, *([self.memlock] if self.memlock else [])]
        return "; ".join(map(str, limits)) or "no limit is known"


# -- reading ---------------------------------------------------------------------------------------
def read_limits(root: Path = Path("/")) -> HostLimits:
    """What the kernel says now. `root` holds ``proc`` and ``sys``."""
    meminfo = _keyed(root / "proc/meminfo")
    status = _keyed(root / "proc/self/status")
    machine = []
    if "MemAvailable" in meminfo:
        free, total = _kib(meminfo["MemAvailable"]), _kib(meminfo.get("MemTotal", "0"))
        because = f"of {gib(total)}, {gib(RESERVE_BYTES)} kept back"
        raise_it = "free memory on this machine, or use one with more"
        machine.append(Limit("MemAvailable", max(free - RESERVE_BYTES, 0), because, raise_it))
    if _text(root / "proc/sys/vm/overcommit_memory").strip() == "2":
        most, taken = (_kib(meminfo.get(name, "0")) for name in ("CommitLimit", "Committed_AS"))
        because = f"limit {gib(most)}, promised {gib(taken)}; vm.overcommit_memory=2"
        machine.append(Limit("CommitLimit", max(most - taken, 0), because, _RAISE_COMMIT))
    return HostLimits(
        total_bytes=_kib(meminfo["MemTotal"]) if "MemTotal" in meminfo else None,
        machine=tuple(machine),
        cgroups=tuple(_cgroups(root)),
        memlock=_memlock(root, status),
        nodes=_nodes(root, status),
    )


def _cgroups(root: Path) -> Iterator[Limit]:
    """A limit for each level that has one, the process's own first."""
    for version, folder, top in _cgroup_places(root):
        level = folder
        while True:
            found = _cgroup_limit(level, version, root)
            if found is not None:
                yield found
            if level == top:
                break
            level = level.parent


def _cgroup_places(root: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, the process's folder, the mount's folder) of each hierarchy that counts memory."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        words = kind.split()
        version = 2 if words[0] == "cgroup2" else 1
        counts = words[0] == "cgroup" and "memory" in words[-1].split(",")
        if version not in paths or not (version == 2 or counts):
            continue
        within, place = (_unescaped(word) for word in mount.split()[3:5])
        top = root / place.lstrip("/")
        # In a container without a cgroup namespace the mount shows a part of the hierarchy only.
        path = paths.pop(version)
        inner = within.rstrip("/")
        below = path[len(inner) :] if path == inner or path.startswith(inner + "/") else ""
        parts = [part for part in below.split("/") if part]
        folder = top if ".." in parts else top.joinpath(*parts)
        yield version, folder if folder.is_dir() else top, top


def _cgroup_limit(folder: Path, version: int, root: Path) -> Limit | None:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    bounds = []
    for name in names:
        text = _text(folder / name).strip()
        if text.isdecimal() and int(text) < _UNLIMITED:
            bounds.append((int(text), name))
    used = _text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")).strip()
    if not bounds or not used.isdecimal():
        return None
    most, name = min(bounds)
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    prefix = "" if version == 2 else "total_"
    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    cache = min(cache, int(used))
    left = max(most - int(used) + cache - RESERVE_BYTES, 0)
    because = (
        f"limit {gib(most)}, in use {gib(int(used))}, of that {gib(cache)} file cache that can be "
        f"dropped, {gib(RESERVE_BYTES)} kept back"
    )
    return Limit(f"cgroup /{(folder / name).relative_to(root)}", left, because, _RAISE_CGROUP)


def _memlock(root: Path, status: dict[str, str]) -> Limit | None:
    if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return None
    for line in _text(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            soft, hard = line.removeprefix("Max locked memory").split()[:2]
            if soft == "unlimited":
                return None
            locked = _kib(status.get("VmLck", "0"))
            top = hard if hard == "unlimited" else gib(int(hard))
            because = f"soft limit {gib(int(soft))}, hard {top}, locked {gib(locked)}"
            return Limit("RLIMIT_MEMLOCK", max(int(soft) - locked, 0), because, RAISE_MEMLOCK)
    return None


# -- NUMA ------------------------------------------------------------------------------------------
def _nodes(root: Path, status: dict[str, str]) -> dict[int, int]:
    allowed = status.get("Mems_allowed_list")
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        number = int(folder.name.removeprefix("node"))
        if allowed is not None and number not in id_list(allowed):
            continue
        text = _text(folder / "meminfo")
        found = dict(line.split(None, 2)[2].split(":", 1) for line in text.splitlines())
        kinds = ("MemFree", "Active(file)", "Inactive(file)")
        size = sum(_kib(found.get(kind, "0")) for kind in kinds)
        if _kib(found.get("MemTotal", "0")):  # a node of CPUs alone holds nothing
            nodes[number] = size
    return nodes


def gpu_node(pci_bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node next to the GPU at `pci_bus_id` (``0000:1B:00.0``), None if none is told."""
    text = _text(root / "sys/bus/pci/devices" / pci_bus_id.lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1: the firmware does not say


def node_cpus(node: int, root: Path = Path("/")) -> frozenset[int]:
    """The CPUs of a NUMA node; empty if the kernel does not tell."""
    return frozenset(id_list(_text(root / f"sys/devices/system/node/node{node}/cpulist")))


def id_list(text: str) -> list[int]:
    """``0-2,8`` as [0, 1, 2, 8]."""
    ids: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            ids += range(int(first), int(last or first) + 1)
    return ids


# -- files -----------------------------------------------------------------------------------------
def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where it is absent or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _keyed(path: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _kib(text: str) -> int:
    """``123 kB`` in bytes."""
    return int(text.split()[0]) * 1024


def _unescaped(text: str) -> str:
    """A path of mountinfo, where blanks and backslashes are written in octal."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
