"""The oldest transformers that is supported gives the same: it runs test_generate_identity.py too.

Beside the newest, which is installed, it lies in a folder of its own (``make test`` puts it there):
5.17 caches expanded keys and values, later versions latents.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = "HISPARSE_OLDEST_TRANSFORMERS"  # where `pip install --no-deps --target` put it
RUN = """
import sys, pytest, transformers
assert transformers.__version__.startswith("5.17."), transformers
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no transformers 5.17")
def test_the_oldest_version_decodes_over_the_tiers():
    folder = Path(os.environ[FOLDER]).resolve()
    paths = os.pathsep.join([str(folder), str(HERE.parents[1])])
    asked = ["-p", "no:cacheprovider", "-W", "ignore", "-k", "float32 or (chunked and glm)"]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, *asked, str(HERE / "test_generate_identity.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "5 passed" in ran.stdout, ran.stdout
