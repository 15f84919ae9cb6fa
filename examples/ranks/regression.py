"""Chains over the processes of torchrun: ``torchrun --standalone --nproc-per-node 2 regression.py``.

With ``data`` as an argument all processes share the minibatches of one chain. Draws go to the folder RUN (``run`` by
default); started again, the run goes on where it was.
"""

import os
import sys

import torch
import torch.distributed as dist

import isosgd

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
else:
    dist.init_process_group("gloo")

torch.manual_seed(0)  # the same model and data on every rank
x = torch.randn(500, 3)
y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3 * torch.randn(500, 1)
target = isosgd.Target.from_module(torch.nn.Linear(3, 1), "gaussian")

parallel = "data" if "data" in sys.argv else "chains"
posterior = isosgd.sample(
    target,
    (x, y),
    chains=4 if parallel == "chains" else 1,
    parallel=parallel,
    store=os.environ.get("RUN", "run"),
    resume=True,
    device="cuda" if torch.cuda.is_available() else None,
)
if dist.get_rank() == 0:
    print(posterior)
    print(posterior.trust())
dist.destroy_process_group()
