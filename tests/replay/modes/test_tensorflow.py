import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("tensorflow")
# it imports only with the help that the mode gives it
pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")

SCRIPT = """
import torch
from opgrip.replay.modes import Task, find_mode
from opgrip.replay.operators import Unsupported

def run(function, *args, **about):
    program = find_mode("tensorflow")[0].make(Task(function, args, {}, **about))
    given, _ = program.enter((args, {}))
    return program.leave(program.function(*given))

x, n = torch.randn(3, 4), torch.arange(4) + 2**40
torch.testing.assert_close(run(lambda a: (a.t() @ a).softmax(-1), x).outputs[0], (x.t() @ x).softmax(-1))
torch.testing.assert_close(run(lambda a: (a * 2, a > 2), n).outputs, [n * 2, n > 2])
torch.testing.assert_close(run(torch.ops.aten.add_.Tensor, x, x.clone(), mutates=True).arguments[0], 2 * x)
refused = (torch.nonzero, 1, "shapes in it hang on values"), (torch.relu, 2, "cannot change to 2")
for function, threads, told in refused:
    try:
        run(function, x, threads=threads)
    except Unsupported as error:
        assert told in str(error), error
    else:
        raise AssertionError(told)
"""


def test_it_gives_eagers_numbers_and_says_in_a_line_what_it_cannot_do(tmp_path):
    # in a process of its own: it starts its threads once
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
