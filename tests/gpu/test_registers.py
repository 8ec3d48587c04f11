"""No kernel reads a register that nothing wrote: `pytest -m gpu tests/gpu/test_registers.py -n 7`, without a GPU.

What is searched for, and how: check_registers.py, which is a command, too. Here it is a process a rule, for Triton
compiles or interprets a whole process through.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.triton_cases import RULES

pytest.importorskip("triton")


@pytest.mark.gpu(needs=0)
@pytest.mark.parametrize("rule", [*RULES, "momentum", "mesa", "slots", "across", "attention"])
def test_registers(rule, record_property):
    command = [sys.executable, "-m", "tests.gpu.check_registers", "--rules", rule]
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = re.search(r"(\d+) kernels, (\d+) read a uniform register", done.stdout)
    assert said, done.stderr[-2000:]
    record_property("kernels", int(said[1]))
    assert int(said[1]) > 0
    assert done.returncode == int(said[2]) == 0, done.stdout
