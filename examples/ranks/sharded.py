"""A model that FSDP2 shards over ranks, sampled: ``torchrun --standalone --nproc-per-node 2 sharded.py``.

Draws go to the folder RUN (``run`` by default), which `isosgd.load` reads in one process. With ``--max-restarts 3``,
when a rank is killed, all are started again and go on from the last checkpoint.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import isosgd

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)  # the same data and the same model on every rank: each keeps rows of its own copy
N, n = 500, 50
x = torch.randn(N, 3, device=device)
y = x @ torch.tensor([[1.0], [-2.0], [0.5]], device=device) + 0.5 * torch.randn(N, 1, device=device)
model = torch.nn.Linear(3, 1, bias=False).to(device)
target = isosgd.Target.from_module(model, isosgd.likelihoods.Gaussian(0.5), isosgd.priors.Flat())

fully_shard(model)
optimizer = isosgd.ISGD(model.named_parameters(), num_data=N, batch_size=n, warmup=int(os.environ.get("WARMUP", 2000)))
collector = isosgd.Collector(optimizer, model, target, keep_every=10, store=os.environ.get("RUN", "run"), resume=True)
batches = torch.Generator().manual_seed(rank)  # other examples on every rank
if (state := collector.restore()) is not None:
    batches.set_state(state["batches"])
while len(collector) < 100:
    rows = torch.randint(N, (n // ranks,), generator=batches)
    optimizer.zero_grad()
    ((model(x[rows]) - y[rows]).square().mean() / (2 * 0.5**2)).backward()
    optimizer.step()
    if optimizer.param_groups[0]["step"] % 500 == 0:
        collector.checkpoint({"batches": batches.get_state()})
posterior = collector.posterior((x, y))
if rank == 0:
    exact = 0.5 * torch.linalg.inv(x.T @ x).diagonal().sqrt()
    print("deviations", posterior.draws["weight"].std((0, 1)).flatten().tolist(), "exact", exact.tolist())
dist.destroy_process_group()
