"""Compiled kernels are kept by CuPy, by the text that it is given, options and architecture.

So the text has to be whole, and whatever a kernel is compiled for has to be in text or options.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from hisparse.device.cuda import kernels
from hisparse.device.cuda.kernels import ResolveSizes, source

FILES = sorted(file.name for file in kernels.SOURCES.iterdir())
HEADERS = [name for name in FILES if name.endswith(".cuh")]
SOURCES = [name for name in FILES if name.endswith(".cu")]


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the sources, which tests change."""
    folder = tmp_path / "kernels"
    shutil.copytree(str(kernels.SOURCES), folder)
    monkeypatch.setattr(kernels, "SOURCES", folder)
    return folder


def change(file):
    file.write_text(file.read_text() + "// changed\n")


def included(name):
    """Its own headers, and those of these."""
    text = (kernels.SOURCES / name).read_text()
    found = set(re.findall(r'^#include "(.+)"$', text, re.MULTILINE))
    return found.union(*(included(header) for header in found))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_is_in_the_text_of_each_source_that_includes_it_and_of_no_other(header, copied):
    before = {name: source(name) for name in SOURCES}
    change(copied / header)
    changed = [name for name in SOURCES if source(name) != before[name]]
    assert changed == [name for name in SOURCES if header in included(name)] != []
    assert not any('#include "' in text for text in before.values())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ResolveSizes)])
def test_each_size_is_in_the_options(field):
    sizes = ResolveSizes(64, 2048, 4096, 1024, 656, 78 * 64)
    other = dataclasses.replace(sizes, **{field: getattr(sizes, field) + 16})
    assert other.options() != sizes.options()


CHILD = """
import json, os, pathlib, sys
from hisparse.device.cuda import kernels
kept = pathlib.Path(os.environ["CUPY_CACHE_DIR"])
for sources, *options in json.loads(sys.argv[1]):
    kernels.SOURCES = pathlib.Path(sources)
    kernels.OPTIONS = ("-std=c++17", *options)
    kernels.load.cache_clear()
    kernels.load("rows.cu")
    files = {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in kept.glob("*.cubin")}
    print(json.dumps(files))
"""


@pytest.mark.gpu
def test_a_second_process_compiles_nothing_but_what_has_changed(copied, tmp_path):
    (kept := tmp_path / "kept").mkdir()
    changed = tmp_path / "changed"
    shutil.copytree(copied, changed)
    change(changed / "faults.cuh")

    def run(*modules):
        """What is kept after each."""
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(modules)],
            capture_output=True,
            text=True,
            env=os.environ | {"CUPY_CACHE_DIR": str(kept)},
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    plain = (str(copied),)
    (first,) = run(plain)
    again, header, option = run(plain, (str(changed),), (str(copied), "-DOTHER=1"))
    assert len(first) == 1 and again == first
    assert len(header) == 2 and first.items() < header.items()
    assert len(option) == 3 and header.items() < option.items()
