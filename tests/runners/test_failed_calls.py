"""A call that fails in one of the processes that share a model raises an error in all of them."""

import socket
import subprocess
import sys

SCRIPT = """
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from griffin_eval.runners.replay import follow, lead
from griffin_eval.runners.torch_parallel import Broadcast, Meeting
from griffin_eval.sharding import processes_torch

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
calls = dist.new_group([0, 1], backend="gloo")
meeting = Meeting([0, 1], "gloo", store)
meeting.make_group()
SUMS = 3  # of a call


class Runner:
    config, framework, devices, device, dtype = None, "torch", 1, "cpu", "float32"

    def read(self, fails_in, place, value):
        total = torch.tensor([float(value + rank)])
        for index in range(SUMS + 1):
            if (fails_in, place) == (rank, index):
                raise MemoryError("injected")
            if index < SUMS:
                processes_torch.summed(total)
        return total.numpy()

    decode_step = score = greedy = read


mine = Runner()
if rank:
    channel = Broadcast(calls, 0, meeting)
    follow(mine, channel.receive, failed=meeting.report, regroup=meeting.regroup)
runner = lead(mine, Broadcast(calls, 0, meeting))
expected = (5 + 6) * 2 ** (SUMS - 1)
assert runner.read(None, 0, 5) == expected
for fails_in in (0, 1):
    for place in range(SUMS + 1):
        failed = 0
        for method in ("read", "decode_step", "score"):  # of which the last two are as they were
            try:
                found = getattr(runner, method)(fails_in if not failed else None, place, 5)
            except MemoryError as error:
                failed += 1
                assert "injected" in str(error), error
            else:
                # One that fails in a follower after its last sum is met in the next call.
                assert found == expected
        assert failed == 1, (fails_in, place, failed)
print("all calls were answered", flush=True)
runner._channel.close()
"""


def test_a_failure_in_any_sum_of_any_process_ends_the_call_in_all():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert "all calls were answered" in said[0], said
    assert [process.returncode for process in both] == [0, 0], said
