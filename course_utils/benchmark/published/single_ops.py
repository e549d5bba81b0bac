"""Single operations and small modules, repeated as Liger-Kernel's benchmark scripts repeat them.

The scripts call a function ten times and report the median of its highest points, so gradients of the iteration before
are there, and new ones are added to them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ...estimating.workspaces import Workspaces
from ...measurement import Measurement
from .running import measured

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64


class Resident(torch.nn.Module):
    """What lives in the process: tensors by name (`leaves` require a gradient), `layers`, `others` that only exist."""

    def __init__(self, leaves: Any = None, others: Any = None, layers: Any = None) -> None:
        super().__init__()
        self.made: Any = None
        for name, tensor in (leaves or {}).items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        for name, tensor in (others or {}).items():
            self.register_buffer(name, tensor)
        for name, layer in (layers or {}).items():
            self.add_module(name, layer)


def empty(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def bf16(*shape: int) -> torch.Tensor:
    """A 16-bit tensor without memory."""
    return empty(*shape, dtype=BF16)


def no_gradient(_: Any, __: Any) -> None:
    """Nothing: backward starts from a loss."""


def like_output(_: Any, y: torch.Tensor) -> torch.Tensor:
    """A gradient that is made anew in each iteration."""
    return torch.randn_like(y)


def resident_gradient(model: Any, _: Any) -> torch.Tensor:
    """The gradient `dy`, made once."""
    return model.dy


def repeated(
    workspaces: Workspaces, model: Resident, forward: Callable[[Any], Any], gradient: Any = no_gradient,
    retain: bool = True, mode: str = "full", before: Callable[[Any], Any] | None = None, products: bool = False,
) -> Measurement:  # fmt: skip
    """The second iteration of `forward(model)` and of its backward.

    `mode` is what an iteration does: "full", "forward" or "backward" (of an output that was made once). `before` makes
    `model.made`, once. `products`: both threads have cuBLAS's workspace from earlier runs of the script.
    """

    def step(model: Any) -> None:
        if model.made is None:
            if products:
                one = torch.empty(1, 1, device="cuda", requires_grad=True)
                torch.autograd.grad((one @ one).sum(), one)
            model.made = before(model) if before else ()
            if mode == "backward":
                y = forward(model)
                model.made = gradient(model, y), y
        if mode == "backward":
            dy, y = model.made
            y.backward(dy, retain_graph=True)
        elif mode == "forward":
            forward(model)
        else:
            y = forward(model)
            y.backward(gradient(model, y), retain_graph=retain)

    return measured(step, model, workspaces=workspaces)


# ------------------------------------------------------------------------------------------------------------- losses


def cross_entropy(workspaces: Workspaces, V: int, tokens: int) -> Measurement:
    """Cross-entropy of fp32 logits (tokens, V)."""
    model = Resident({"logits": empty(tokens, V)}, {"targets": empty(tokens, dtype=INT64)})
    return repeated(workspaces, model, lambda has: F.cross_entropy(has.logits, has.targets), retain=False)


def linear_cross_entropy(workspaces: Workspaces, h: int, V: int, tokens: int) -> Measurement:
    """A 16-bit output layer and cross-entropy in 16 bits; the kernel's module has a weight of its own."""
    leaves = {"weight": bf16(V, h), "kernels": bf16(V, h), "x": bf16(tokens, h)}

    def forward(has: Any) -> torch.Tensor:
        return F.cross_entropy(F.linear(has.x, has.weight), has.targets)

    model = Resident(leaves, {"targets": empty(tokens, dtype=INT64)})
    return repeated(workspaces, model, forward, retain=False)


def jensen_shannon(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Half of each divergence from the mean of two distributions, whose logarithm is taken twice."""
    mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    to_p = F.kl_div(torch.log(mean), log_p, reduction="batchmean", log_target=True)
    return 0.5 * to_p + 0.5 * F.kl_div(torch.log(mean), log_q, reduction="batchmean", log_target=True)


def jensen_shannon_by_row(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The same, summed over each row before it is halved."""
    mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    to_p = F.kl_div(torch.log(mean), log_p, reduction="none", log_target=True).sum(-1)
    both = 0.5 * to_p + 0.5 * F.kl_div(torch.log(mean), log_q, reduction="none", log_target=True).sum(-1)
    return (both / len(log_p)).sum()


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Half of the sum of absolute differences, per row."""
    return torch.sum(torch.abs(p - q) / 2.0) / len(p)


DISTANCES: dict[str, tuple[Any, ...]] = {
    "kl": (torch.log_softmax, lambda target, given: F.kl_div(given, target, reduction="batchmean"), no_gradient),
    "jsd": (torch.log_softmax, jensen_shannon, no_gradient),
    "jsd-by-row": (torch.log_softmax, jensen_shannon_by_row, like_output),
    "tvd": (torch.softmax, total_variation, no_gradient),
}
"""How logits become what is compared, the distance, and the gradient from which backward starts."""


def distance(workspaces: Workspaces, of: str, V: int, tokens: int) -> Measurement:
    """A distance from given probabilities, in fp32; its own were made once, and backward goes through them."""
    normalize, loss, gradient = DISTANCES[of]
    model = Resident({"leaf": empty(tokens, V)}, {"target": empty(tokens, V)})

    def before(has: Any) -> torch.Tensor:
        return normalize(has.leaf, -1)

    return repeated(workspaces, model, lambda has: loss(has.target, has.made), gradient, before=before)


def linear_jsd(workspaces: Workspaces, h: int, V: int, tokens: int) -> Measurement:
    """Two 16-bit output layers (a student's, a teacher's), their log-softmax, and the distance in fp32."""
    leaves = {"student": bf16(V, h), "teacher": bf16(V, h), "x": bf16(tokens, h)}

    def forward(has: Any) -> torch.Tensor:
        students, teachers = F.linear(has.x, has.student), F.linear(has.given, has.teacher)
        log_q, log_p = torch.log_softmax(students / 1.0, -1), torch.log_softmax(teachers / 1.0, -1)
        return jensen_shannon(log_p.float(), log_q.float()).to(BF16)

    return repeated(workspaces, Resident(leaves, {"given": bf16(tokens, h)}), forward, retain=False)


def linear_orpo(workspaces: Workspaces, h: int, V: int, batch: int, T: int) -> Measurement:
    """The odds-ratio preference loss on fp32 copies of 16-bit logits; the kernel's module has a weight of its own."""
    leaves = {"weight": bf16(V, h), "kernels": bf16(V, h), "x": bf16(batch, T, h)}
    half = batch // 2

    def log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = targets != -100
        chosen = torch.where(targets == -100, 0, targets).unsqueeze(2)
        each = torch.gather(logits.log_softmax(-1), 2, chosen).squeeze(2)
        return (each * mask).sum(-1) / mask.sum(-1)

    def concatenated(has: Any) -> tuple[torch.Tensor, ...]:
        out = has.x @ has.weight.t()
        logits = out.float()
        nll = F.cross_entropy(logits[:half].view(-1, V), has.targets[:half].view(-1))
        each = log_probabilities(logits, has.targets)
        return each[:half], each[half:], logits[:half], logits[half:], nll

    def forward(has: Any) -> torch.Tensor:
        better, worse, _, _, nll = concatenated(has)
        odds = (better - worse) - (torch.log1p(-torch.exp(better)) - torch.log1p(-torch.exp(worse)))
        return nll - (0.1 * F.logsigmoid(odds)).mean()

    model = Resident(leaves, {"targets": empty(batch, T, dtype=INT64)})
    return repeated(workspaces, model, forward, retain=False)


def linear_cosine(workspaces: Workspaces, h: int, V: int, tokens: int) -> Measurement:
    """Distillation by cosine similarity on fp32 copies of a student's (h / 2) and a teacher's 16-bit logits."""
    leaves = {name: bf16(V, size) for name, size in {"student": h // 2, "teacher": h, "s2": h // 2, "t2": h}.items()}
    leaves |= {"unused": bf16(tokens, h // 2), "x": bf16(tokens, h // 2)}

    def hard(has: Any) -> tuple[torch.Tensor, ...]:
        student = has.x @ has.student.t()
        with torch.no_grad():
            teacher = has.given @ has.teacher.t()
        students, teachers = student.view(tokens, -1).float(), teacher.view(tokens, -1).float()
        return students, teachers, F.cross_entropy(students, has.targets)

    def forward(has: Any) -> torch.Tensor:
        students, teachers, loss = hard(has)
        students /= 1.0
        teachers /= 1.0
        similar = F.cosine_similarity(F.normalize(students, dim=-1), F.normalize(teachers, dim=-1), dim=-1)
        return 0.5 * loss + 0.5 * (1 - similar).mean()

    others = {"base": bf16(tokens, h // 2), "given": bf16(tokens, h), "targets": empty(tokens, dtype=INT64)}
    return repeated(workspaces, Resident(leaves, others), forward, retain=False)


def linear_grpo(workspaces: Workspaces, h: int, V: int, batch: int, T: int, by_sequence: bool) -> Measurement:
    """The group-relative policy loss with a reference's output layer; the kernel's module has two more of them."""
    leaves = {name: bf16(V, h) for name in ("weight", "reference", "kernels", "kernels_too")}
    leaves["x"] = bf16(batch, T, h)

    def forward(has: Any) -> torch.Tensor:
        logits = has.x @ has.weight.t()
        log_p = F.log_softmax(logits.float(), -1)
        each = log_p.gather(-1, has.ids.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            reference_logits = has.given @ has.reference.t()
            log_r = F.log_softmax(reference_logits.float(), -1)
            given = log_r.gather(-1, has.ids.unsqueeze(-1)).squeeze(-1)
        change = each - each.detach()
        if by_sequence:
            change = ((change * has.mask).sum(-1) / has.mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = torch.exp(change)
        clipped = torch.clamp(ratio, 0.8, 1.2)
        loss = -torch.min(ratio * has.gain.unsqueeze(1), clipped * has.gain.unsqueeze(1))
        loss = loss + 0.1 * (torch.exp(given - each) - (given - each) - 1.0)
        return (loss * has.mask).sum() / has.mask.sum().clamp(min=1.0)

    others = {"ids": empty(batch, T, dtype=INT64), "mask": empty(batch, T), "gain": bf16(batch)}
    return repeated(workspaces, Resident(leaves, others | {"given": bf16(batch, T, h)}), forward, retain=False)


# -------------------------------------------------------------------------------------------------------------- norms


def layer_norm(workspaces: Workspaces, rows: int, h: int) -> Measurement:
    """LayerNorm in fp32; the kernel's module of the same size lives too."""
    layers = {"kernels": torch.nn.LayerNorm(h, device="meta"), "norm": torch.nn.LayerNorm(h, device="meta")}
    return norm(workspaces, layers, rows, h)


def group_norm(workspaces: Workspaces, batch: int, channels: int, length: int) -> Measurement:
    """GroupNorm in fp32, four channels to a group; the kernel's module of the same size lives too."""
    layers = {name: torch.nn.GroupNorm(channels // 4, channels, device="meta") for name in ("kernels", "norm")}
    return norm(workspaces, layers, batch, channels, length)


def norm(workspaces: Workspaces, layers: Any, *shape: int) -> Measurement:
    """A norm of an fp32 tensor, and its backward from a gradient that lives already."""
    model = Resident({"x": empty(*shape)}, {"dy": empty(*shape)}, layers)
    return repeated(workspaces, model, lambda has: has.norm(has.x), resident_gradient)


def rms_norm_by_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Llama's RMSNorm as transformers has it: single operations on an fp32 copy."""
    hidden = x.to(FP32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + 1e-6)
    return weight * hidden.to(x.dtype)


def llama_rms_norm(workspaces: Workspaces, rows: int, h: int) -> Measurement:
    """Llama's RMSNorm of a 16-bit tensor by an fp32 weight: fp32 comes out; the kernel's weight lives too."""
    leaves = {"kernels": empty(h), "weight": empty(h), "x": bf16(rows, h)}
    model = Resident(leaves, {"dy": bf16(rows, h)})
    return repeated(workspaces, model, lambda has: rms_norm_by_parts(has.x, has.weight), resident_gradient)


def add_rms_norm(workspaces: Workspaces, rows: int, h: int) -> Measurement:
    """Llama's RMSNorm of a sum, which is an output too; kernels' modules have three more weights."""
    leaves = {name: empty(h) for name in ("weight", "kernels", "kernels_too", "kernels_third")}
    leaves |= {"x": empty(rows, h), "residual": empty(rows, h)}

    def parts(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = x.to(FP32), residual.to(FP32)
        hidden = hidden + residual
        residual = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return weight * hidden, residual

    def step(has: Any) -> None:
        y, s = parts(has.x, has.residual, has.weight)
        torch.autograd.backward((y, s), (has.dy, has.ds))

    return measured(step, Resident(leaves, {"dy": empty(rows, h), "ds": empty(rows, h)}), workspaces=workspaces)


def fused_rms_norm(workspaces: Workspaces, rows: int, h: int) -> Measurement:
    """torch's RMSNorm in 16 bits, and backward from the sum of what it gives."""
    norms = {"norm": torch.nn.RMSNorm(h, eps=1e-6, device="meta", dtype=BF16)}

    def step(has: Any) -> None:
        y = has.norm(has.x)
        y.sum().backward()

    return measured(step, Resident({"x": bf16(rows, 1, h)}, layers=norms), workspaces=workspaces)


# ----------------------------------------------------------------------------------------------- element by element


def elementwise(workspaces: Workspaces, of: str, n: int, dtype: str) -> Measurement:
    """The square of a ReLU, or a softmax, of one row."""
    model = Resident({"x": empty(n, dtype=getattr(torch, dtype))})

    def relu_squared(x: torch.Tensor) -> torch.Tensor:
        positive = F.relu(x)
        return torch.square(positive)

    operation = {"relu_squared": relu_squared, "softmax": lambda x: F.softmax(x, dim=-1)}[of]
    return repeated(workspaces, model, lambda has: operation(has.x), lambda _, y: torch.ones_like(y))


def swiglu_of_halves(workspaces: Workspaces, rows: int, batch: int, ffn: int) -> Measurement:
    """SiLU of one half times the other, in 16 bits; the input's gradient is dropped first."""

    def step(has: Any) -> None:
        has.x.grad = None
        gate, up = torch.chunk(has.x, 2, -1)
        y = F.silu(gate) * up
        y.sum().backward()

    return measured(step, Resident({"x": bf16(rows, batch, 2 * ffn)}), workspaces=workspaces)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """The second half with its sign changed, then the first."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def rope(workspaces: Workspaces, h: int, T: int, complex_numbers: bool = False) -> Measurement:
    """Rotary positions of 32 query and 8 key heads in 16 bits, and their gradients by `autograd.grad`.

    With real numbers q and k are transposed views; as `complex_numbers` they are leaves.
    """
    size, heads = h // 32, {"q": 32, "k": 8}
    order = (lambda one: one) if complex_numbers else (lambda one: one.transpose(1, 2))

    def before(has: Any) -> tuple[Any, ...]:
        views = tuple(order(getattr(has, name)) for name in heads)
        return views, tuple(torch.randn_like(one) for one in views)

    def real(has: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = has.cos.unsqueeze(1), has.sin.unsqueeze(1)
        q_out = (q * cos) + (rotate_half(q) * sin)
        return q_out, (k * cos) + (rotate_half(k) * sin)

    def by_complex(has: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q_pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        k_pairs = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        q_out = torch.view_as_real(q_pairs * has.turns[:, :, None, :]).flatten(3)
        k_out = torch.view_as_real(k_pairs * has.turns[:, :, None, :]).flatten(3)
        return q_out.type_as(q), k_out.type_as(k)

    def step(has: Any) -> None:
        if has.made is None:
            has.made = before(has)
        views, gradients = has.made
        outputs = (by_complex if complex_numbers else real)(has, *views)
        torch.autograd.grad(outputs, views, gradients, allow_unused=True, retain_graph=True)

    tables = {"turns": empty(1, T, size // 2, dtype=torch.complex64)}
    tables = tables if complex_numbers else {"cos": bf16(1, T, size), "sin": bf16(1, T, size)}
    others = tables | {"positions": empty(1, T, dtype=INT64), "frequencies": empty(size // 2)}
    model = Resident({name: bf16(1, T, count, size) for name, count in heads.items()}, others)
    return measured(step, model, workspaces=workspaces)


# ------------------------------------------------------------------------------------------------------------- layers


def gated_mlp(
    workspaces: Workspaces, batch: int, T: int, h: int, ffn: int, activation: str, mode: str = "full"
) -> Measurement:
    """Llama's feed-forward layer in 16 bits with "silu" or "gelu" (its tanh form)."""
    act = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}[activation]
    leaves = {"x": bf16(batch, T, h), "gate": bf16(ffn, h), "up": bf16(ffn, h), "down": bf16(h, ffn)}

    def forward(has: Any) -> torch.Tensor:
        return F.linear(act(F.linear(has.x, has.gate)) * F.linear(has.x, has.up), has.down)

    return repeated(workspaces, Resident(leaves), forward, like_output, mode=mode, products=True)


class BandedAttention(torch.nn.Module):
    """Attention by single operations under a mask that is made in each forward."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(h, h) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, T, h = x.shape
        q, k, v = (
            layer(x).view(b, T, self.heads, h // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) * 0.125
        mask = torch.zeros(T, T, dtype=torch.bool, device=x.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v)
        mixed = mixed.transpose(1, 2).contiguous().view(b, T, h)
        return self.out(mixed)


def banded_attention(workspaces: Workspaces, batch: int, T: int, h: int, heads: int) -> Measurement:
    """`BandedAttention` in fp32; the kernel's module of the same size lives too."""
    with torch.device("meta"):
        layers = {name: BandedAttention(h, heads) for name in ("kernels", "attention")}
    model = Resident({"x": empty(batch, T, h)}, {"dy": empty(batch, T, h)}, layers)
    return repeated(workspaces, model, lambda has: has.attention(has.x), resident_gradient, products=True)


def experts(workspaces: Workspaces, T: int, h: int, ffn: int, E: int, mode: str) -> Measurement:
    """A mixture of E experts in a Python loop, in 16 bits, of which every token goes to every one."""
    leaves = {"x": bf16(T, h), "gates": bf16(E, 2 * ffn, h), "downs": bf16(E, h, ffn), "weights": bf16(T, E)}

    def before(has: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return has.gates * 0.02, has.downs * 0.02

    def forward(has: Any, gates: torch.Tensor, downs: torch.Tensor) -> torch.Tensor:
        final = torch.zeros_like(has.x)
        with torch.no_grad():
            hits = torch.zeros(T, E, E, dtype=INT64, device="cuda").permute(2, 1, 0)
        for expert in range(E):
            place, token = torch.zeros(2, len(hits[expert, 0]), dtype=INT64, device="cuda").unbind()
            now = has.x[token]
            gate, up = F.linear(now, gates[expert]).chunk(2, -1)
            now = F.silu(gate) * up
            now = F.linear(now, downs[expert])
            now = now * has.weights[token, place, None]
            final.index_add_(0, token, now)
        return final

    def with_weights(has: Any) -> torch.Tensor:
        if "scaled" not in vars(has):
            has.scaled = before(has)
        return forward(has, *has.scaled)

    model = Resident(leaves, {"chosen": empty(T, E, dtype=torch.int32)})
    return repeated(workspaces, model, with_weights, like_output, mode=mode, products=True)
