"""Checks of lesson 05: right answers of every style pass, and each planted wrong answer gets its hint."""

from typing import Any

import numpy as np
import torch
from checking import Answers, JudgedAnswers
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils.interactive.saved_tensors import saved_by
from course_utils.lessons.activations import checks as lesson_05

TANH, RELU, SIGMOID, EXP, DIVIDED = lesson_05.EXPRESSIONS
RIGHT = {TANH: 1, RELU: 1, SIGMOID: 2, EXP: 2, DIVIDED: 1}


def counting(changes: dict[str, float], each: float = 2) -> Any:
    return lambda n: {name: each * n * count for name, count in (RIGHT | changes).items()}


def asks_autograd(n: int) -> dict[str, int]:
    kept = {name: saved_by(work, (n,), (n,), dtype="bf16") for name, work in lesson_05.EXPRESSIONS.items()}
    return {name: sum(item.bytes for item in items) for name, items in kept.items()}


EXPRESSIONS = Answers(
    right=[
        counting({}),
        asks_autograd,
        lambda n: dict(zip(RIGHT, np.array([2, 2, 4, 4, 2]) * n, strict=True)),
    ],
    wrong=[
        (counting({TANH: 3}), "an addition needs neither of its terms. What does tanh need?"),
        (counting({TANH: 2}), "so its output is enough. What else did you count?"),
        (counting({RELU: 2}), "How many storages are these two?"),
        (counting({SIGMOID: 3}), "which the product needs, too. It is stored once"),
        (counting({SIGMOID: 1}), "needs both factors"),
        (counting({EXP: 1}), "Does exp keep the same storage?"),
        (counting({EXP: 3}), "exp needs only its output"),
        (counting({DIVIDED: 2}), "a division by a number keeps nothing. Neither"),
        (counting({}, each=1), "A bf16 number takes two"),
        (counting({}, each=4), "All are twice too large"),
        (counting({}, each=16), "tanh(x + y) is off"),
        (lambda n: counting({})(4096), "the same for every n"),
    ],
)


def watching(model: Any, running: list[str]) -> list[Any]:
    """Hooks that keep the names of the running modules in a list, as the exercise gives them."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    return handles


def kept(
    size: Any = lambda tensor: tensor.untyped_storage().nbytes(),
    known: Any = lambda model, x: [x, *model.parameters(), *model.buffers()],
    key: Any = lambda tensor: tensor.untyped_storage(),
    name: Any = lambda running: [running[-1]],
) -> Any:
    """An answer, with ideas of a tensor's bytes, of what was there, of what is the same, of whose it is."""

    def answer(model: Any, x: Any) -> dict[str, int]:
        running: list[str] = []
        seen = {key(tensor) for tensor in known(model, x)}
        found = {}
        alive = []

        def keep(tensor: Any) -> Any:
            alive.append(tensor)
            if key(tensor) not in seen:
                seen.add(key(tensor))
                for one in name(running):
                    found[one] = found.get(one, 0) + size(tensor)
            return tensor

        handles = watching(model, running)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(x)
        for handle in handles:
            handle.remove()
        return found

    return answer


def kept_in_two_passes(model: Any, x: Any) -> Any:
    """First a list of pairs, with names; then storages, the first name for each, zeros included."""
    running: list[str] = []
    pairs: list[Any] = []
    handles = watching(model, running)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: pairs.append((running[-1], tensor)) or tensor, lambda one: one
    ):
        out = model(x)
    for handle in handles:
        handle.remove()
    first: dict[Any, Any] = {}
    for name, tensor in pairs:
        first.setdefault(tensor.untyped_storage(), name)
    for tensor in (x, *model.parameters(), *model.buffers()):
        first.pop(tensor.untyped_storage(), None)
    assert out is not None
    return {
        name: np.int64(sum(len(one) for one, of in first.items() if of == name))
        for name, _ in model.named_modules()
    }


def each_tensor(model: Any, x: Any) -> Any:
    """Whatever is saved counts, unless it is in the storage of x, a parameter or a buffer."""
    pairs = []
    running = []
    known = {tensor.untyped_storage() for tensor in (x, *model.parameters(), *model.buffers())}
    handles = watching(model, running)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: pairs.append((running[-1], one)) or one, lambda one: one
    ):
        out = model(x)
    for handle in handles:
        handle.remove()
    sizes = [(name, len(one.untyped_storage())) for name, one in pairs if one.untyped_storage() not in known]
    return (
        {name: sum(size for other, size in sizes if other == name) for name, _ in sizes}
        if out is not None
        else {}
    )


KEPT_BY_MODULE = Answers(
    right=[kept(), kept_in_two_passes, kept(key=lambda tensor: tensor.untyped_storage().data_ptr())],
    wrong=[
        (each_tensor, "you count some storages more than once"),
        (kept(size=lambda tensor: tensor.nbytes), "you count the bytes of a view"),
        (kept(size=lambda tensor: tensor.numel()), "'heads' has too little. Do you add up?"),
        (lambda model, x: {name: size for name, size in kept()(model, x).items() if name}, "'' has nothing"),
        (kept(known=lambda model, x: [x, *model.buffers()]), "you count parameters, too"),
        (kept(known=lambda model, x: []), "you count what existed before"),
        (kept(key=id), "Does a storage count twice"),
        (kept(known=lambda model, x: [*model.parameters(), *model.buffers()]), "you count x, too"),
        (kept(known=lambda model, x: [x, *model.parameters()]), "you count a buffer"),
        (kept(name=lambda running: running[:1]), "you give bytes to the outermost module"),
        (kept(name=lambda running: running[-2:-1] or running), "you give bytes to the module around"),
        (kept(name=lambda running: running), "you give a module what its submodules keep, too"),
        (kept(name=lambda running: [running[-1].split(".")[-1]]), "is not a name of `named_modules()`"),
        (lambda model, x: {}, "'heads' has nothing"),
        (lambda model, x: {name: x.nbytes for name, _ in model.named_modules()}, "has too much"),
        (
            lambda model, x: kept()(model, x)["first"],
            "Called with a Sequential, a tensor of (2, 5, 8) in float32, your",
        ),
        (lambda model, x: sum(kept()(model, x).values()), "but the exercise asks for a dictionary"),
        (lambda model, x: {name: str(size) for name, size in kept()(model, x).items()}, "is a text"),
        (lambda model, x: kept()(model.eval(), x), "has too little"),
    ],
)


def gating(block: Any, gate: Any, up: Any) -> Any:
    return F.dropout(F.silu(gate) * up, block.rate, block.training)


def again(function: Any, *given: Any) -> Any:
    return checkpoint(function, *given, use_reentrant=False)


def repaired(
    norm: Any = lambda block, x: block.norm(x),
    gated: Any = lambda block, gate, up: again(gating, block, gate, up),
    log: Any = lambda block, y: block.log.append(y.detach().abs().mean()),
    branch: Any = lambda x, y: x + y,
) -> Any:
    def answer(block: Any, x: Any) -> Any:
        normal = norm(block, x)
        y = block.down(gated(block, block.gate(normal), block.up(normal)))
        log(block, y)
        return branch(x, y)

    return answer


class Gate(torch.autograd.Function):
    """SiLU(gate) · up with dropout by hand: inputs and the state of random numbers are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any, rate: float) -> Any:
        ctx.state = torch.get_rng_state()
        ctx.rate = rate
        ctx.save_for_backward(gate, up)
        return F.dropout(F.silu(gate) * up, rate)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            out = F.dropout(F.silu(gate) * up, ctx.rate)
        return *torch.autograd.grad(out, [gate, up], grads), None


def seeded_again(block: Any, gate: Any, up: Any) -> Any:
    """A checkpoint without the random state: another mask in backward."""
    return checkpoint(gating, block, gate, up, use_reentrant=False, preserve_rng_state=False)


def all_again(block: Any, x: Any) -> Any:
    y = again(lambda x: block.down(gating(block, block.gate(block.norm(x)), block.up(block.norm(x)))), x)
    block.log.append(y.abs().mean().item())
    return x + y


def logs_inside(block: Any, x: Any) -> Any:
    def tail(gate: Any, up: Any) -> Any:
        y = block.down(gating(block, gate, up))
        block.log.append(y.abs().mean().item())
        return y

    normal = block.norm(x)
    return x + again(tail, block.gate(normal), block.up(normal))


def by_hand(block: Any, x: Any) -> Any:
    centered = x - x.mean(-1, keepdim=True)
    normal = centered / (centered.square().mean(-1, keepdim=True) + block.norm.eps).sqrt()
    return block.norm.weight * normal + block.norm.bias


def without_eps(block: Any, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], block.norm.weight, block.norm.bias)


def always_a_tenth(block: Any, gate: Any, up: Any) -> Any:
    return again(lambda: F.dropout(F.silu(gate) * up, 0.1, block.training))


def one_matrix(block: Any, x: Any) -> Any:
    gate, up = (block.norm(x) @ torch.cat([block.gate.weight, block.up.weight]).T).chunk(2, -1)
    y = block.down(again(gating, block, gate, up))
    block.log.append(y.abs().mean().item())
    return x + y


def down_inside(block: Any, x: Any) -> Any:
    """The last product in the checkpoint: backward stops before it, once it has its input."""
    normal = block.norm(x)
    y = again(lambda gate, up: block.down(gating(block, gate, up)), block.gate(normal), block.up(normal))
    block.log.append(y.abs().mean().item())
    return x + y


LEAN = Answers(
    right=[
        repaired(),
        repaired(
            gated=lambda block, gate, up: Gate.apply(gate, up, block.rate * block.training),
            log=lambda block, y: block.log.append(y.abs().mean().item()),
        ),
        repaired(
            norm=lambda block, x: F.layer_norm(
                x, x.shape[-1:], block.norm.weight, block.norm.bias, block.norm.eps
            ),
            branch=torch.add,
        ),
        down_inside,
    ],
    wrong=[
        (lambda block, x: block(x), "Your log holds a graph"),
        (repaired(gated=gating), "one wide tensor too many"),
        (repaired(norm=by_hand), "The norm's tensors, or copies of weights?"),
        (one_matrix, "The norm's tensors, or copies of weights?"),
        (repaired(norm=without_eps), "bias, eps)"),
        (repaired(gated=always_a_tenth), "at its rate"),
        (
            repaired(log=lambda block, y: setattr(block, "log", [y.abs().mean().item()])),
            "`block.log` are gone",
        ),
        (repaired(branch=lambda x, y: x.detach() + y), "by both paths?"),
        (repaired(log=lambda block, y: block.log.append(y.abs().mean())), "Your log holds a graph"),
        (repaired(log=lambda block, y: None), "Yours logs 0"),
        (repaired(log=lambda block, y: block.log.extend([y.mean().item()] * 2)), "Yours logs 2"),
        (
            repaired(log=lambda block, y: block.log.append(y.mean().item())),
            "another number than the block does",
        ),
        (all_again, "A matrix product runs a second time"),
        (logs_inside, "A matrix product runs a second time"),
        (repaired(gated=seeded_again), "Does the second forward drop the same?"),
        (
            repaired(gated=lambda block, gate, up: again(lambda: F.dropout(F.silu(gate) * up, 0.1))),
            "nothing dropped",
        ),
        (repaired(gated=lambda block, gate, up: again(lambda: F.silu(gate) * up)), "only in training?"),
        (repaired(norm=lambda block, x: F.layer_norm(x, x.shape[-1:])), "Is the norm complete (weight"),
        (repaired(branch=lambda x, y: y), "(weight, bias, eps)? Is it SiLU, is x added"),
        (repaired(log=lambda block, y: block.log.append(y.detach())), "a tensor of 3,200 numbers"),
        (repaired(log=lambda block, y: block.log.append(str(y.abs().mean().item()))), "entry is a text"),
        (repaired(gated=lambda block, gate, up: gating(block, gate.detach(), up)), "by both paths?"),
    ],
)


def in_steps(logits: Any) -> Any:
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    return wide.sub_(top).exp_().sum(-1, keepdim=True).log_().add_(top)


def in_halves(logits: Any) -> Any:
    return torch.cat([part.float().logsumexp(-1, keepdim=True) for part in logits.split(16)])


def loss_function(
    forward: Any = lambda sums, picked, weight: weight @ (sums - picked)[:, 0],
    backward: Any = lambda p, weight, dloss: p.mul_(dloss * weight[:, None]),
    probabilities: Any = lambda logits, sums: logits.float().sub_(sums).exp_(),
    weights: Any = lambda targets: (targets >= 0) / (targets >= 0).sum(),
    places: Any = lambda targets: targets.clamp(min=0),
    saving: Any = None,
    log_sums: Any = in_steps,
) -> Any:
    """The right Function, but for one step."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any) -> Any:
            weight = weights(targets)
            picked = logits.gather(-1, places(targets)[:, None])
            sums = log_sums(logits)
            ctx.save_for_backward(logits, targets, sums, weight)
            if saving:
                saving(ctx, logits)
            return forward(sums, picked, weight)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            logits, targets, sums, weight = ctx.saved_tensors
            p = probabilities(logits, sums)
            p.scatter_add_(-1, places(targets)[:, None], -torch.ones_like(sums, dtype=p.dtype))
            return backward(p, weight, *grads).to(logits.dtype), None

    return Loss


class InPieces(torch.autograd.Function):
    """Sixteen rows at a time in fp32; forward makes the gradient, in 16 bits, which is all that is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        gradient = torch.empty_like(logits)
        count = (targets != -100).sum()
        total = torch.zeros(())
        for rows in torch.arange(len(targets)).split(16):
            with torch.enable_grad():
                piece = logits[rows].float().requires_grad_()
                loss = F.cross_entropy(piece, targets[rows], reduction="sum") / count
            gradient[rows] = torch.autograd.grad(loss, piece)[0].to(logits.dtype)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0], None


class WithIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        rows = (targets != -100).nonzero()[:, 0]
        sums = torch.cat([row.float().logsumexp(-1)[None] for row in logits])
        ctx.save_for_backward(logits, targets, sums)
        return (sums[rows] - logits[rows, targets[rows]].float()).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, targets, sums = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        rows = (targets != -100).nonzero()[:, 0]
        for row in rows:
            p = (logits[row].float() - sums[row]).exp()
            p[targets[row]] -= 1
            gradient[row] = (p * grads[0] / len(rows)).to(logits.dtype)
        return gradient, None


def loss_by_checkpoint(logits: Any, targets: Any) -> Any:
    return again(lambda logits: F.cross_entropy(logits.float(), targets), logits)


def exponentials(logits: Any, targets: Any) -> Any:
    rows = targets >= 0
    picked = logits[rows, targets[rows]].float()
    return (logits[rows].float().exp().sum(-1).log() - picked).mean()


def over_the_logits(logits: Any, sums: Any) -> Any:
    p = logits.float().sub_(sums).exp_()
    logits.detach().copy_(p)
    return p


def picked_too_late(logits: Any, targets: Any) -> Any:
    """Looks the target up where the row's largest number has gone already."""
    z = logits.float()
    rows = targets >= 0
    top = z.detach().amax(-1, keepdim=True)
    z = z - top
    return (z.exp().sum(-1).log() + top[:, 0] - z.gather(-1, targets.clamp(min=0)[:, None])[:, 0])[
        rows
    ].mean()


class WithMask(torch.autograd.Function):
    """A mask as index, which stops a simulated GPU; logsumexp takes a second fp32 tensor all the same."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        keep = targets != -100
        z = logits.float()
        picked = z.gather(-1, targets.clamp(min=0)[:, None])
        sums = torch.logsumexp(z, -1, keepdim=True)
        ctx.save_for_backward(logits, targets, sums)
        return (sums - picked)[keep].mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, targets, sums = ctx.saved_tensors
        keep = (targets != -100)[:, None]
        p = logits.float().sub_(sums).exp_()
        p.scatter_add_(-1, targets.clamp(min=0)[:, None], -torch.ones_like(sums))
        return p.mul_(keep * grads[0] / keep.sum()).to(logits.dtype), None


class TwoFp32(WithMask):
    """As `WithMask`, by steps in forward, and with two fp32 tensors in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        keep = targets != -100
        sums = in_steps(logits)
        ctx.save_for_backward(logits, targets, sums)
        return (sums - logits.gather(-1, targets.clamp(min=0)[:, None]).float())[keep].mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, targets, sums = ctx.saved_tensors
        keep = (targets != -100)[:, None]
        p = (logits.float() - sums).exp()
        p.scatter_add_(-1, targets.clamp(min=0)[:, None], -torch.ones_like(sums))
        return (p * keep * grads[0] / keep.sum()).to(logits.dtype), None


def in_sixteen_bits(sums: Any, picked: Any, weight: Any) -> Any:
    return weight @ (sums - picked)[:, 0].float()


def over_itself(logits: Any, targets: Any) -> Any:
    return F.cross_entropy(logits.copy_(logits * 1.5).float(), targets)


def all_places(targets: Any) -> Any:
    return torch.ones(len(targets)) / len(targets)


LEAN_LOSS = Answers(
    right=[loss_function(), InPieces, WithIndex.apply, loss_function(log_sums=in_halves)],
    wrong=[
        (lambda logits, targets: F.cross_entropy(logits.float(), targets), "as large as the fp32 copy"),
        (lambda logits, targets: F.cross_entropy(logits, targets), "computed in 16 bits"),
        (loss_by_checkpoint, "at one moment two fp32 tensors"),
        (
            loss_function(log_sums=lambda logits: logits.float().logsumexp(-1, keepdim=True)),
            "`logsumexp` makes one",
        ),
        (
            loss_function(probabilities=lambda logits, sums: (logits - sums.to(logits.dtype)).exp_()),
            "in 16 bits",
        ),
        (
            loss_function(probabilities=lambda logits, sums: logits.log_softmax(-1).exp()),
            "its gradient is not. It is close",
        ),
        (
            loss_function(probabilities=lambda logits, sums: (logits.float() - sums).exp()),
            "at one moment two fp32",
        ),
        (loss_function(saving=lambda ctx, logits: ctx.save_for_backward(logits, logits.float())), "Backward"),
        (
            loss_function(saving=lambda ctx, logits: setattr(ctx, "copy", logits.float())),
            "as large as the fp32 copy",
        ),
        (loss_function(backward=lambda p, weight, dloss: p * weight[:, None]), "Its sign is reversed"),
        (loss_function(backward=lambda p, weight, dloss: p * dloss), "one factor everywhere"),
        (loss_function(backward=lambda p, weight, dloss: p * dloss / len(weight)), "have a gradient of 0"),
        (
            loss_function(probabilities=lambda logits, sums: torch.zeros_like(logits)),
            "It is softmax, minus 1",
        ),
        (loss_function(forward=lambda sums, picked, weight: (sums - picked).sum()), "A sum, not a mean?"),
        (loss_function(forward=lambda sums, picked, weight: (sums - picked)[:, 0]), "not a single number"),
        (
            loss_function(weights=lambda targets: (targets >= 0) / len(targets)),
            "Average only tokens that count",
        ),
        (loss_function(weights=all_places), "the loss is wrong"),
        (loss_function(places=lambda targets: targets), "A row has no entry -100"),
        (exponentials, "exp overflows, or you take the log of 0"),
        (picked_too_late, "Is z still unchanged where you look up the target?"),
        (loss_function(probabilities=over_the_logits), "overwrites the logits"),
        (WithMask.apply, "`logsumexp` makes one inside"),
        (TwoFp32.apply, "Which operations can overwrite their input?"),
        (
            loss_function(
                log_sums=lambda logits: logits.logsumexp(-1, keepdim=True), forward=in_sixteen_bits
            ),
            "computed in 16 bits",
        ),
        (over_itself, "changes argument 1"),
    ],
)


ANSWERS = {"05.1": EXPRESSIONS, "05.2": KEPT_BY_MODULE, "05.3": LEAN, "05.4": LEAN_LOSS}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
