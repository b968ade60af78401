"""What machine, cgroups, memlock and NUMA allow, read from made roots; refusals say the fix."""

from __future__ import annotations

import mmap

import pytest
from device_rig import make_config

from hisparse import backend_halves
from hisparse.backend import HiSparseBackend
from hisparse.config import GIB
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.cuda.host_pages import near_gpu
from hisparse.device.cuda.host_register import try_memlock
from hisparse.device.host_demand import check_node, check_pool, suspects
from hisparse.device.host_limits import RESERVE_BYTES, gpu_node, node_cpus, read_limits
from hisparse.device.layout import Geometry
from hisparse.errors import CapacityError, DeviceError

MIB = 1 << 20
GPU = "0000:1B:00.0"
V2 = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw,nsdelegate\n"


def machine(root, files):
    """A root with `files` (by path) beside a machine of 64 GiB, 40 of them available."""
    files = {
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\n",
        "proc/self/status": "CapEff:\t0000000000000000\nVmLck:\t 0 kB\nMems_allowed_list:\t0-1\n",
    } | files
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(str(text))
    return root


def group(folder, most, used, cache=0, version=2):
    """Files of a cgroup whose file cache is half active and half not."""
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    )  # fmt: skip
    start = "" if version == 2 else "total_"
    stat = "".join(f"{start}{kind}_file {cache // 2}\n" for kind in ("active", "inactive"))
    stat += f"{start}shmem 123\nactive_file 99999999999\n" * (version == 1)
    return {
        f"{folder}/{names[0]}": most,
        f"{folder}/{names[1]}": used,
        f"{folder}/memory.stat": stat,
    }


def v2(path="/", mount=V2):
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mount}


def node(number, free_kib, cpus):
    at = f"sys/devices/system/node/node{number}"
    lines = {"MemTotal": 33554432, "MemFree": free_kib, "Active(file)": 1024, "Inactive(file)": 0}
    text = "".join(f"Node {number} {name}:  {kib} kB\n" for name, kib in lines.items())
    return {f"{at}/meminfo": text, f"{at}/cpulist": cpus + "\n"}


# -- reading ---------------------------------------------------------------------------------------
def test_a_machine_without_cgroups_is_bound_by_what_is_available_less_a_reserve(tmp_path):
    limits = read_limits(machine(tmp_path, {}))
    assert [x.left_bytes for x in limits.machine] == [40 * GIB - RESERVE_BYTES]
    assert limits.cgroups == () and limits.memlock is None and limits.total_bytes == 64 * GIB


def test_a_root_that_says_nothing_holds_no_limit(tmp_path):
    limits = read_limits(tmp_path)
    assert (limits.machine, limits.cgroups, limits.nodes) == ((), (), {})
    check_pool(limits, 1 << 50, "host pool")


def test_a_cgroup_leaves_its_limit_less_its_use_and_file_cache_counts_as_free(tmp_path):
    at = "sys/fs/cgroup/pods/a"
    files = v2("/pods/a") | group(at, 16 * GIB, 9 * GIB, cache=2 * GIB)
    (limit,) = read_limits(machine(tmp_path, files)).cgroups
    assert limit.left_bytes == 9 * GIB - RESERVE_BYTES
    assert limit.name == f"cgroup /{at}/memory.max"


def test_every_level_of_the_hierarchy_binds(tmp_path):
    files = v2("/pods/a")
    files |= group("sys/fs/cgroup/pods/a", "max", GIB) | group("sys/fs/cgroup/pods", 8 * GIB, GIB)
    limits = read_limits(machine(tmp_path, files))
    assert [x.name for x in limits.cgroups] == ["cgroup /sys/fs/cgroup/pods/memory.max"]
    with pytest.raises(CapacityError, match=r"pods/memory\.max leaves 6\.5 GiB"):
        check_pool(limits, 7 * GIB, "host pool")


def test_memory_high_binds_before_memory_max(tmp_path):
    files = v2("/a") | group("sys/fs/cgroup/a", 16 * GIB, 0) | {"sys/fs/cgroup/a/memory.high": GIB}
    (limit,) = read_limits(machine(tmp_path, files)).cgroups
    assert limit.name.endswith("memory.high") and limit.left_bytes == GIB - RESERVE_BYTES


def test_cgroup_v1_counts_the_whole_tree_below(tmp_path):
    mount = "31 20 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    mount += "32 20 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    files = {
        "proc/self/cgroup": "4:memory:/docker/a\n1:cpu:/\n0::/\n",
        "proc/self/mountinfo": mount,
    }
    files |= group("sys/fs/cgroup/memory/docker/a", 8 * GIB, 3 * GIB, cache=GIB, version=1)
    files |= group("sys/fs/cgroup/memory", 9223372036854771712, 5 * GIB, version=1)
    (limit,) = read_limits(machine(tmp_path, files)).cgroups
    assert limit.left_bytes == 6 * GIB - RESERVE_BYTES


@pytest.mark.parametrize("path", ["/pods/a", "/../b", "/"])
def test_in_a_container_the_mount_shows_only_its_own_group(tmp_path, path):
    """Without a cgroup namespace the path is the host's; with one it may point outside."""
    mount = V2.replace(" / ", " /pods/a ", 1)
    files = v2(path, mount) | group("sys/fs/cgroup", 4 * GIB, GIB)
    (limit,) = read_limits(machine(tmp_path, files)).cgroups
    assert limit.left_bytes == 3 * GIB - RESERVE_BYTES


def test_a_mount_with_a_blank_in_its_path_is_found(tmp_path):
    mount = V2.replace("/sys/fs/cgroup", r"/sys/fs/my\040group")
    files = v2("/", mount) | group("sys/fs/my group", 4 * GIB, GIB)
    assert len(read_limits(machine(tmp_path, files)).cgroups) == 1


def test_a_kernel_that_refuses_overcommit_is_bound_by_what_it_has_promised(tmp_path):
    files = {
        "proc/sys/vm/overcommit_memory": "2\n",
        "proc/meminfo": "MemTotal: 67108864 kB\nCommitLimit: 33554432 kB\nCommitted_AS: 8388608 kB",
    }
    (limit,) = read_limits(machine(tmp_path, files)).machine
    assert limit.left_bytes == 24 * GIB and "vm.overcommit_ratio" in limit.raise_it


def memlock(soft, hard="unlimited", capabilities="0", locked_kib=0):
    return {
        "proc/self/limits": f"Max locked memory         {soft}    {hard}    bytes     \n",
        "proc/self/status": f"CapEff:\t{capabilities}\nVmLck:\t{locked_kib} kB\n",
    }


def test_memlock_leaves_its_soft_limit_less_what_is_locked(tmp_path):
    limits = read_limits(machine(tmp_path, memlock(8 * MIB, locked_kib=1024)))
    assert limits.memlock.left_bytes == 7 * MIB


@pytest.mark.parametrize("files", [memlock("unlimited"), memlock(MIB, capabilities="4000")])
def test_no_memlock_limit_is_counted_if_unlimited_or_with_the_capability(tmp_path, files):
    assert read_limits(machine(tmp_path, files)).memlock is None


# -- NUMA ------------------------------------------------------------------------------------------
TWO_NODES = node(0, 1024, "0-3") | node(1, 2048, "4-6,8")


def test_the_gpus_node_and_its_cpus_are_read(tmp_path):
    at = f"sys/bus/pci/devices/{GPU.lower()}/numa_node"
    root = machine(tmp_path, TWO_NODES | {at: "1\n"})
    assert gpu_node(GPU, root) == 1 and node_cpus(1, root) == {4, 5, 6, 8}
    assert read_limits(root).nodes == {0: 2 * MIB, 1: 3 * MIB}
    near = near_gpu(GPU, read_limits(root), 3 * MIB, root)
    assert near.node == 1 and near.why == f"node 1, next to GPU {GPU}"
    assert "as far as its" in near_gpu(GPU, read_limits(root), 4 * MIB, root).why


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, "names no NUMA node of GPU"),
        ({f"sys/bus/pci/devices/{GPU.lower()}/numa_node": "-1\n"}, "names no NUMA node of GPU"),
        ({f"sys/bus/pci/devices/{GPU.lower()}/numa_node": "2\n"}, "excludes node 2"),
    ],
)
def test_memory_that_cannot_be_near_the_gpu_says_why(tmp_path, extra, why):
    root = machine(tmp_path, TWO_NODES | node(2, 1024, "9") | extra)
    placement = near_gpu(GPU, read_limits(root), MIB, root)
    assert placement.node is None and why in placement.why


# -- refusals --------------------------------------------------------------------------------------
def refused(limits, size, what="host pool"):
    with pytest.raises(CapacityError) as caught:
        check_pool(limits, size, what)
    return caught.value


def test_a_pool_beyond_the_machine_is_refused_with_a_size_that_would_do(tmp_path):
    limits = read_limits(machine(tmp_path, {}))
    error = refused(limits, 41 * GIB)
    assert "MemAvailable leaves 39.5 GiB (of 64 GiB" in str(error) and "free memory" in str(error)
    most = error.fixes["pools.host_pool_gib"]
    assert most == 39.5
    check_pool(limits, int(most * GIB), "host pool")


def test_a_pool_beyond_a_cgroup_is_refused_and_told_how_to_raise_it(tmp_path):
    files = v2("/a") | group("sys/fs/cgroup/a", 8 * GIB, 6 * GIB, cache=GIB)
    error = refused(read_limits(machine(tmp_path, files)), 4 * GIB)
    for said in ("/sys/fs/cgroup/a/memory.max", "limit 8 GiB, in use 6 GiB", "docker run --memory"):
        assert said in str(error)
    assert error.fixes == {"pools.host_pool_gib": 2.5}


def test_every_limit_that_does_not_hold_is_named_and_the_tightest_gives_the_fix(tmp_path):
    files = v2("/a") | group("sys/fs/cgroup/a", 8 * GIB, 0)
    error = refused(read_limits(machine(tmp_path, files)), 100 * GIB)
    assert "MemAvailable" in str(error) and "memory.max" in str(error)
    assert error.fixes == {"pools.host_pool_gib": 7.5}


def test_a_machine_that_is_full_offers_no_size(tmp_path):
    full = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 1024 kB\n"}
    assert refused(read_limits(machine(tmp_path, full)), GIB).fixes == {}


# -- the node --------------------------------------------------------------------------------------
def node_config(pool_gib, ranks=1, suffix_gib=0.0):
    suffix = {"name": "cpu", "gib": suffix_gib} if suffix_gib else {}
    groups = ((0, 2, 3, 4, 5, 6, 7), (1,))  # a page is 256 B: no padding
    config = make_config(groups=groups, suffix=suffix, ranks=ranks)
    pools = config.pools.model_copy(update={"host_pool_gib": pool_gib})
    return config.model_copy(update={"pools": pools})


def test_replicas_and_their_private_ranks_are_added_up(tmp_path):
    limits = read_limits(machine(tmp_path, {}))  # 39.5 GiB
    check_node(node_config(9.8, ranks=2), limits, replicas=2)
    with pytest.raises(CapacityError) as caught:
        check_node(node_config(10, ranks=2), limits, replicas=2)
    assert "2 replica(s) x 2 host pool(s) of 10 GiB = 40 GiB" in str(caught.value)
    most = caught.value.fixes["pools.host_pool_gib"]
    assert most == 9.875
    check_node(node_config(most, ranks=2), limits, replicas=2)


def test_ranks_that_share_a_pool_count_it_once(tmp_path):
    limits = read_limits(machine(tmp_path, {}))
    check_node(node_config(19.7, ranks=8), limits, replicas=2, shared=True)
    with pytest.raises(CapacityError, match=r"2 replica\(s\) x 1 host pool\(s\) of 20 GiB"):
        check_node(node_config(20, ranks=8), limits, replicas=2, shared=True)


def test_the_suffix_tier_of_every_rank_is_added(tmp_path):
    limits = read_limits(machine(tmp_path, {}))
    with pytest.raises(CapacityError, match=r"\+ 4 suffix pool\(s\) of 1 GiB") as caught:
        check_node(node_config(9, ranks=4, suffix_gib=1), limits)
    most = caught.value.fixes["pools.host_pool_gib"]
    assert most == 8.875
    check_node(node_config(most, ranks=4, suffix_gib=1), limits)


def test_a_replica_in_a_container_of_its_own_answers_to_that_containers_limit(tmp_path):
    files = v2("/a") | group("sys/fs/cgroup/a", 12 * GIB, 0)
    limits = read_limits(machine(tmp_path, files))
    check_node(node_config(9), limits, replicas=4, replicas_here=1)
    with pytest.raises(CapacityError, match=r"4 replica\(s\).*memory.max leaves 11.5 GiB"):
        check_node(node_config(9), limits, replicas=4)


def test_pools_that_stand_already_are_not_asked_for_twice(tmp_path):
    limits = read_limits(machine(tmp_path, {}))
    config = node_config(15)
    standing = Geometry.of(config).host_pool_bytes
    with pytest.raises(CapacityError):
        check_node(config, limits, replicas=3)
    assert check_node(config, limits, replicas=3, standing_bytes=standing).replicas == 3


class Pinning(SimDevice):
    """Says that it pins, and lets nobody."""

    name = "cuda"

    def allocate_pinned(self, *args, **kwargs):
        raise AssertionError("a pool was taken before the node was checked")


def test_a_replica_checks_the_node_before_it_takes_a_pool(tmp_path, monkeypatch):
    limits = read_limits(machine(tmp_path, {}))
    monkeypatch.setattr(backend_halves, "read_limits", lambda: limits)
    with pytest.raises(CapacityError, match=r"1 replica\(s\) x 1 host pool\(s\) of 40 GiB = 40"):
        HiSparseBackend(node_config(40), device=Pinning())


# -- memlock, tried --------------------------------------------------------------------------------
class Driver:
    """A driver that pins `most_bytes` at most."""

    def __init__(self, most_bytes=1 << 60):
        self.most_bytes, self.pinned = most_bytes, {}

    def register(self, address, size):
        if sum(self.pinned.values()) + size > self.most_bytes:
            raise DeviceError("cudaHostRegister: cudaErrorMemoryAllocation: out of memory")
        self.pinned[address] = size

    def unregister(self, address):
        del self.pinned[address]


def test_a_driver_that_counts_memlock_is_found_out_and_the_error_says_how_to_raise_it(tmp_path):
    limits = read_limits(machine(tmp_path, memlock(8 * MIB, hard=16 * MIB)))
    with pytest.raises(CapacityError) as caught:
        try_memlock(Driver(8 * MIB), limits, GIB, GIB, "host pool")
    for said in ("RLIMIT_MEMLOCK", "ulimit -l", "memlock=-1", "LimitMEMLOCK", "hard 0.01562 GiB"):
        assert said in str(caught.value)
    assert caught.value.fixes == {"pools.host_pool_gib": 0.007}


def test_a_driver_that_does_not_count_memlock_is_believed_and_nothing_stays_pinned(tmp_path):
    limits = read_limits(machine(tmp_path, memlock(8 * MIB)))
    driver = Driver()
    try_memlock(driver, limits, GIB, GIB, "host pool")
    assert driver.pinned == {}


def test_nothing_is_tried_where_memlock_is_wide_enough_or_too_wide_for_a_trial(tmp_path):
    limits = read_limits(machine(tmp_path, memlock(8 * MIB)))
    refusing = Driver(0)
    try_memlock(refusing, limits, 8 * MIB, GIB, "host pool")
    try_memlock(refusing, limits, GIB, 8 * MIB - mmap.PAGESIZE, "host pool")


def test_an_error_without_a_reason_names_the_limits_that_are_short(tmp_path):
    limits = read_limits(machine(tmp_path, memlock(8 * MIB)))
    assert "RLIMIT_MEMLOCK leaves" in suspects(limits, 9 * MIB)
    assert "no limit that is known explains it" in suspects(limits, MIB)
