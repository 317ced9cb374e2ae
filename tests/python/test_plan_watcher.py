"""The watcher of a plan's timed runs may be replaced while a run is in progress."""

import os
import subprocess
import sys

# Freed memory is overwritten, so that a call of a watcher that is gone does not go unnoticed.
PROGRAM = """
import sys, threading, time
import deepwell, torch
from deepwell.optimize import sessions

torch.set_num_threads(1)
model = deepwell.optimize(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]), verbose=False)
x = torch.randn(4, 8)
with torch.no_grad():
    model(x)
(program,) = model.forward.programs()
(plan,) = program.plans()
plan.profile(True)
ends = threading.Event()


def run():
    with torch.no_grad():
        while not ends.is_set():
            model(x)


calls = []


class Watcher:
    def __call__(self, instruction, begins):
        calls.append(instruction)


sys.setswitchinterval(1e-5)
thread = threading.Thread(target=run)
thread.start()
end = time.monotonic() + 2
while time.monotonic() < end:
    plan.watch(Watcher())
    plan.watch(None)
ends.set()
thread.join()
assert calls
print("done")
"""


def test_a_watcher_may_be_replaced_during_a_run():
    environment = {"PYTHONMALLOC": "debug", "DEEPWELL_MEASURE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0 and done.stdout.split() == ["done"], (done.stdout, done.stderr)
