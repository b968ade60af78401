"""The CUDA C++ sources without a GPU: they compile for each architecture, sizes are refused.

Without nvcc the tests that compile are skipped, and say so at the end of the run, unless
HISPARSE_NVCC=required, as in CI: then they fail.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest
from backends import RACECHECK

from hisparse.device.cuda.copies import _PAGES
from hisparse.device.cuda.kernels import SOURCES as FOLDER
from hisparse.device.cuda.kernels import ResolveSizes, source
from hisparse.device.cuda.resolver import _ARGUMENTS, fetch_blocks
from hisparse.device.cuda.tables import _BEGIN
from hisparse.errors import ConfigError, DeviceError

SIZES = {
    "glm-fp8": ResolveSizes(64, 2048, 4096, 1024, 656, 78 * 64),
    "bf16": ResolveSizes(64, 2048, 6144, 512, 1152, 61 * 64),
    "odd": ResolveSizes(16, 49, 101, 40, 576, 8 * 16),
}
SOURCES = tuple(
    f"{name}.cu" for name in ["resolve", "fetch", "copy", "attend", "hold", "rows", "tables"]
)
BUILDS = [(arch, name, ()) for arch in ("sm_80", "sm_90", "sm_100") for name in SOURCES]
BUILDS += [(arch, "resolve_one.cu", ()) for arch in ("sm_90", "sm_100")]  # which have clusters
BUILDS += [("sm_90", "resolve_one.cu", RACECHECK)]  # the form that racecheck is run on


def test_every_source_is_compiled():
    folder = [file.name for file in FOLDER.iterdir() if file.name.endswith(".cu")]
    assert sorted(folder) == sorted({name for _, name, _ in BUILDS})


def nvcc():
    found = shutil.which("nvcc")
    if found is None and os.environ.get("HISPARSE_NVCC") == "required":
        pytest.fail("HISPARSE_NVCC=required: install nvcc of CUDA 12.8 or later")
    if found is None:
        pytest.skip("NO NVCC: the CUDA sources were not compiled on this machine")
    return found


@pytest.mark.parametrize(
    ("wanted", "code", "told"),
    [("", 0, f"SKIPPED [{len(BUILDS)}]"), ("required", 1, f"{len(BUILDS)} failed")],
)
def test_a_missing_nvcc_is_told_at_the_end_and_fails_where_it_is_required(
    wanted, code, told, tmp_path
):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "sources_compile", "--tb=line"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": str(tmp_path), "HISPARSE_NVCC": wanted},
    )
    assert done.returncode == code, done.stdout
    assert told in done.stdout
    assert ("HISPARSE_NVCC=required: install" if wanted else "NO NVCC") in done.stdout


@pytest.mark.parametrize(("arch", "name", "more"), BUILDS)
def test_sources_compile_for_each_architecture_without_a_warning(arch, name, more, tmp_path):
    whole = tmp_path / name
    whole.write_text(source(name))
    sizes = SIZES["glm-fp8" if arch == "sm_90" else "odd" if arch == "sm_80" else "bf16"]
    options = (*sizes.options(), *more, f"-arch={arch}", "-cubin")
    command = [nvcc(), *options, "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, str(whole), "-o", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_shared_memory_that_is_asked_for_is_what_the_kernel_uses(sizes, tmp_path):
    probe = tmp_path / "probe.cu"
    probe.write_text(
        source("resolve.cu") + f"\nstatic_assert(sizeof(Shared) <= {sizes.shared_bytes}, "
        f'"more");\nstatic_assert(sizeof(Shared) > {sizes.shared_bytes} - 64, "less");\n'
    )
    done = subprocess.run(
        [nvcc(), *sizes.options(), "-arch=sm_90", "-cubin", str(probe), "-o", str(tmp_path / "o")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sizes", "said", "fixes"),
    [
        ((64, 2048, 4096, 1024, 650, 512), "row_bytes=650: .* use 656", {"row_bytes": 656}),
        ((64, 2048, 40000, 1024, 656, 512), "rows=40000: .* use 16384", {"hot_rows": 16384}),
        ((64, 2048, 2000, 1024, 656, 512), "rows=2000: .* use 2048", {"hot_rows": 2048}),
        (
            (64, 20000, 30000, 1024, 656, 512),
            "top_k=20000: .* at most 16384",
            {"top_k": 16384, "hot_rows": 16384},
        ),
    ],
)
def test_sizes_that_no_kernel_holds_are_refused_with_those_that_would_do(sizes, said, fixes):
    with pytest.raises(ConfigError, match=said) as caught:
        ResolveSizes(*sizes)
    assert named(caught.value) == fixes
    names = [field.name for field in dataclasses.fields(ResolveSizes)]
    ResolveSizes(**dict(zip(names, sizes, strict=True)) | fixes)


@pytest.mark.parametrize(
    ("sizes", "limit", "said", "fixes"),
    [
        ((1, 1025, 1025, 4096, 656, 61), 232448, "1025 blocks .* least 2$", {"page_size": 2}),
        ((64, 8193, 16384, 64, 656, 512), 232448, "395152 bytes .* has 232448", {"top_k": 8192}),
        ((64, 2048, 16384, 4096, 656, 512), 101376, "use policy.hot_rows=", {"hot_rows": 4096}),
        ((64, 4096, 8192, 64, 656, 512), 76000, "use policy.top_k=2048$", {"top_k": 2048}),
        (
            (64, 4096, 16384, 64, 656, 512),
            60000,
            "use policy.top_k=2048 and policy.hot_rows=4096$",
            {"top_k": 2048, "hot_rows": 4096},
        ),
    ],
)
def test_sizes_that_one_block_cannot_plan_for_are_refused_with_those_it_can(
    sizes, limit, said, fixes
):
    wanted = ResolveSizes(*sizes)
    with pytest.raises(ConfigError, match=said) as caught:
        wanted.check_block(limit)
    assert named(caught.value) == fixes
    dataclasses.replace(wanted, **fixes).check_block(limit)
    one_more = {name: n - 1 if name == "page_size" else n + 1 for name, n in fixes.items()}
    with pytest.raises(ConfigError):
        dataclasses.replace(wanted, **one_more).check_block(limit)
    ResolveSizes(64, 2048, 16384, 4096, 656, 512).check_block(166912)  # on an A100 too


def named(error):
    """Its fixes, without the sections of their fields."""
    return {path.split(".")[1]: value for path, value in error.fixes.items()}


def test_a_gpu_on_which_nothing_could_be_planned_gets_no_sizes():
    with pytest.raises(ConfigError, match=r"use another GPU$") as caught:
        SIZES["glm-fp8"].check_block(4096)
    assert caught.value.fixes == {}


def test_a_device_with_no_room_to_plan_beside_a_fetch_is_refused():
    with pytest.raises(DeviceError, match=r"1 multiprocessor cannot .* use a larger"):
        fetch_blocks(1)
    assert [fetch_blocks(n) for n in (2, 8, 9, 132)] == [1, 7, 8, 8]


@pytest.mark.parametrize(
    ("struct", "file", "layout"),
    [
        ("Pages", "copy.cu", _PAGES),
        ("Resolve", "resolve.cu", _ARGUMENTS),
        ("Begin", "tables.cu", _BEGIN),
    ],
)
def test_parameters_are_laid_out_as_the_kernel_reads_them(struct, file, layout, tmp_path):
    offsets = "\n".join(
        f'static_assert(offsetof({struct}, {name}) == {layout.fields[name][1]}, "{name}");'
        for name in layout.names
    )
    probe = tmp_path / "probe.cu"
    probe.write_text(
        f"#include <cstddef>\n{source(file)}\n{offsets}\n"
        f'static_assert(sizeof({struct}) == {layout.itemsize}, "size");\n'
    )
    options = (*SIZES["odd"].options(), "-arch=sm_90", "-cubin")
    done = subprocess.run(
        [nvcc(), *options, str(probe), "-o", str(tmp_path / "o")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
