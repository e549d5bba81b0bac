"""Steps on one of several ranks: torchtitan's Llamas with FSDP2, and DistributedDataParallel."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course_utils.estimating.workspaces import Workspaces
from course_utils.measurement import Measurement
from course_utils.measuring.devices import Phases
from course_utils.measuring.optimizers import named_states_of
from course_utils.measuring.sharded import ShardTracker, quick_plans, simulated_ranks
from course_utils.measuring.simulated import cycles_left_alone, simulated_gpu
from course_utils.measuring.step import follow, provenance_of

from .running import measured

aten = torch.ops.aten


class Norm(nn.Module):
    """RMSNorm of single operations in fp32; the weight is multiplied in the input's format."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """x (b, s, heads, head width) with neighbors as complex numbers, turned in fp32."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * rotations.view(1, x.size(1), 1, -1)).flatten(3).type_as(x)


def selective() -> Any:
    """Keep attention's output and every other matrix product of a block, recompute all else."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = operator is aten.mm.default
        products[context.is_recompute] += product
        kept = products[context.is_recompute] % 2 if product else operator in ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


class Block(nn.Module):
    """Attention and SwiGLU without biases; `recompute` is "none", "full" or "selective"."""

    def __init__(self, d: int, heads: int, kv_heads: int, ffn: int, recompute: str) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.width = d // heads
        self.wq, self.wk, self.wv = (
            linear(d, d),
            linear(d, kv_heads * self.width),
            linear(d, kv_heads * self.width),
        )
        self.wo = linear(d, d)
        self.w1 = linear(d, ffn)
        self.w2 = linear(ffn, d)
        self.w3 = linear(d, ffn)
        self.before_attention = Norm(d)
        self.before_ffn = Norm(d)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        if self.recompute == "none":
            return self.run(x, rotations)
        how: dict[str, Any] = {"context_fn": selective} if self.recompute == "selective" else {}
        return checkpoint(self.run, x, rotations, use_reentrant=False, preserve_rng_state=False, **how)

    def run(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.before_attention(x), rotations)
        return h + self.feed_forward(self.before_ffn(h))

    def attention(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (linear(x).view(b, s, -1, self.width) for linear in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rotations), rotated(k, rotations)
        groups = q.size(2) // k.size(2)
        if groups > 1:
            k, v = (y.unsqueeze(3).expand(-1, -1, -1, groups, -1).reshape(q.shape) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(nn.Module):
    """Untied; `positions` rotations are kept, and the logits become fp32 inside forward if `upcast`.

    `recompute` is that of each block, in turns: ["none", "full"] is every second one.
    """

    def __init__(
        self,
        L: int,
        d: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        V: int,
        positions: int,
        recompute: Sequence[str],
        upcast: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, d)
        self.register_buffer("rotations", torch.empty(positions, d // heads // 2, dtype=torch.complex64))
        self.blocks = nn.ModuleList(
            Block(d, heads, kv_heads, ffn, recompute[number % len(recompute)]) for number in range(L)
        )
        self.norm = Norm(d)
        self.head = nn.Linear(d, V, bias=False)
        self.upcast = upcast

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, self.rotations[: tokens.size(1)])
        logits = self.head(self.norm(h))
        return logits.float() if self.upcast else logits


class TitanTraining:
    """torchtitan's step: gradients are set to None at its start, and clipped before AdamW updates.

    Where the model upcasts its logits (March 2024), they live until the next forward has made new ones; else
    (December 2024) the loss upcasts them, and their name is deleted before backward.
    """

    losses: list[float]
    skipped_an_update = False

    def __init__(self, network: Llama, b: int, s: int, V: int, implementation: str, chunks: int) -> None:
        self.network = network
        self.chunks = chunks
        self.losses = []
        foreach = implementation == "foreach"
        fused = implementation == "fused"
        self.optimizer = torch.optim.AdamW(
            network.parameters(), weight_decay=0.1, foreach=foreach, fused=fused
        )
        self.tokens, self.targets = (torch.randint(V, (b, s), device="cuda") for _ in range(2))
        self.logits: torch.Tensor | None = None

    def named_states(self) -> list[tuple[str, Any]]:
        """The optimizer's tensors."""
        names = {id(weight): name for name, weight in self.network.named_parameters()}
        return named_states_of(self.optimizer, names)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in fp32, in chunks of the sequence."""
        parts = zip(logits.chunk(self.chunks, 1), self.targets.chunk(self.chunks, 1), strict=True)
        total: Any = sum(F.cross_entropy(x.flatten(0, 1).float(), y.flatten(0, 1)) for x, y in parts)
        return total / self.chunks

    def step(self, tracker: Phases) -> None:
        """One step, each phase named to `tracker`."""
        with tracker.in_phase("forward"):
            self.optimizer.zero_grad()
            self.logits = self.network(self.tokens)
        with tracker.in_phase("loss"):
            loss = self.loss(self.logits)
            if not self.network.upcast:
                self.logits = None
        with tracker.in_phase("backward"):
            loss.backward()
        with tracker.in_phase("clip"):
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        with tracker.in_phase("optimizer"):
            self.optimizer.step()
            tracker.bind_states()


def titan(
    workspaces: Workspaces,
    ranks: int,
    b: int,
    s: int,
    L: int,
    d: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    V: int,
    positions: int,
    recompute: Sequence[str],
    upcast: bool = False,
    stay: int = 1,
    implementation: str = "foreach",
    chunks: int = 1,
    steps: int = 2,
) -> Measurement:
    """The last of `steps` steps; FSDP2 shards each block, then the rest, gathers bf16 and reduces fp32
    gradients.

    The last `stay` blocks stay gathered after their forward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class EarlyReduceScatter(DefaultReduceScatter):
        """As FSDP2's `foreach_reduce_scatter` of March 2024, whose input was on the same stream as its
        output.
        """

        def allocate(self, *size: Any, **how: Any) -> torch.Tensor:
            root: Any = network
            with torch.cuda.stream(root._get_fsdp_state()._fsdp_param_group.comm_ctx.reduce_scatter_stream):
                return super().allocate(*size, **how)

    with simulated_ranks(ranks) as mesh, simulated_gpu("flash"), cycles_left_alone(), quick_plans():
        with torch.device("cuda"):
            network = Llama(L, d, heads, kv_heads, ffn, V, positions, recompute, upcast)
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        for number, block in enumerate(network.blocks, start=1):
            fully_shard(block, reshard_after_forward=number <= L - stay, **how)
        fully_shard(network, **how)
        if upcast:
            units: list[Any] = [*network.blocks, network]
            for unit in units:
                unit.set_custom_reduce_scatter(EarlyReduceScatter())
        training: Any = TitanTraining(network, b, s, V, implementation, chunks)
        provenance = provenance_of("simulated", f"rank 0 of {ranks} simulated ranks")
        return follow(training, ShardTracker("cuda", workspaces), steps, provenance)


class Replica(nn.Module):
    """Linear layers as DistributedDataParallel holds them before its first backward: all gradients have one
    bucket.

    Its reducer cannot be simulated, so the bucket is a buffer of their sizes (`bucket_sizes` in
    estimating.sharding).
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.register_buffer("bucket", torch.empty(sum(weight.numel() for weight in self.parameters())))


def replicated(
    _: Workspaces, layers: int, width: int, b: int, ranks: int = 1, update: bool = True
) -> Measurement:
    """The first step of Linear layers under DistributedDataParallel, with Adam as a loop over parameters.

    The optimizer steps the weights that ZeroRedundancyOptimizer leaves to rank 0 of `ranks`. No workspaces:
    until 2022, cuBLAS had its own, which torch's allocator did not count.
    """
    with torch.device("meta"):
        network = Replica(layers, width)
        batch = torch.empty(b, width), torch.empty(b, width)
    optimizer = torch.optim.Adam(list(network.parameters())[: 2 * layers // ranks], foreach=False)

    def step(network: Any, optimizer: Any, batch: Any) -> None:
        F.mse_loss(network.layers(batch[0]), batch[1]).backward()
        if update:
            optimizer.step()

    return measured(step, network, optimizer, batch, steps=1)
