"""The course's network and its training step, told operation by operation as `networks/` and `measuring/step.py` run
them: the same order, and the same tensors held by the same variables.
"""

from .attention import Attention, Shared
from .experts import Experts
from .layers import MLP, Linear, Norm, call
from .loss import mean_loss, scaled, scaled_up
from .operations import Step, Weight, add, dropout, root
from .recomputation import Offloading, checkpoint
from .structure import Structure
from .tape import Gradient, Saving, Tape, Tensor


class Block:
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.norm1, self.attention = Norm(step, "norm1"), Attention(step)
        self.norm2 = Norm(step, "norm2")
        self.mlp = Experts(step) if step.structure.experts else MLP(step)

    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        x = add(self.step, x, call(self.attention, call(self.norm1, x), shared))
        return add(self.step, x, call(self.mlp, call(self.norm2, x)))


class Network:
    """The whole: embeddings, blocks in groups, final norm, head."""

    def __init__(self, step: Step) -> None:
        self.step, shape = step, step.structure
        self.embedding = Weight(step, "V·h")
        self.positions = Weight(step, "P·h")
        self.groups = [[Block(step) for _ in range(size)] for size in shape.groups]
        self.offloads: Offloading | None = None
        self.norm = Norm(step, "final norm")
        self.head = Linear(step, "head", "h", "V", bias=False)
        if shape.tied:
            self.head.weight = self.embedding

    def features(self) -> Tensor:
        """Everything before the head."""
        step, shape = self.step, self.step.structure
        x = embedded(step, self.embedding)
        if shape.positions == "learned":
            x = plus_positions(step, x, looked_up(step, self.positions, step.tape.tensor("8", "s")))
        x = dropout(step, x, "embedding")
        x = self.blocks(x, shared_by_blocks(step))
        step.tape.enter("head")
        return call(self.norm, x)

    def blocks(self, x: Tensor, shared: Shared) -> Tensor:
        """The blocks, group by group, keeping for backward what the run says."""
        step = self.step
        for number, blocks in enumerate(self.groups):
            step.tape.enter(("block", number, 0))
            if step.structure.recompute == "blocks":
                x = checkpoint(step, run_group, step, number, blocks, x, shared)
            elif step.structure.recompute == "selective":
                x = checkpoint(step, run_group, step, number, blocks, x, shared, keep_products=True)
            elif step.structure.recompute == "offload":
                with step.tape.packing(self.offloading(shared).pack):
                    x = run_group(step, number, blocks, x, shared)
            else:
                x = run_group(step, number, blocks, x, shared)
        return x

    def offloading(self, shared: Shared) -> Offloading:
        """One for all blocks, so that what they share in turn is copied once."""
        if self.offloads is None:
            self.offloads = Offloading(self.step, self.step.structure.is_small, shared)
        return self.offloads


def run_group(step: Step, number: int, blocks: list[Block], x: Tensor, shared: Shared) -> Tensor:
    """One group of blocks, one after the other."""
    for position, block in enumerate(blocks):
        if position:
            step.tape.enter(("block", number, position))
        x = call(block, x, shared)
    return x


def embedded(step: Step, table: Weight) -> Tensor:
    """Rows of the table, one a token. Its gradient is dense, V·h, though a batch touches few rows."""
    table.stand()
    tape, back = step.tape, table.leaf.size
    out = tape.tensor(table.element, "sb·h")
    tape.apply(out, [table.leaf], [], lambda _: [tape.gradient(back)])
    return out


def looked_up(step: Step, table: Weight, indices: Tensor) -> Tensor:
    """Rows of the positions' table, one a position; keeps the indices."""
    table.stand()
    tape, back = step.tape, table.leaf.size
    out = tape.tensor(table.element, "s·h")
    saved = [Saving(indices, "positions", "position indices", "which rows get a gradient")]
    tape.apply(out, [table.leaf], saved, lambda _: [tape.gradient(back)])
    return out


def plus_positions(step: Step, x: Tensor, positions: Tensor) -> Tensor:
    """Each sequence plus the positions, whose gradient is summed over the sequences."""
    out = step.tape.tensor(x.element, "sb·h")
    becomes = positions.size
    step.tape.apply(
        out, [x, positions], [], lambda gradients: [gradients[0].again(), gradients[0].again(True, becomes)]
    )
    return out


def shared_by_blocks(step: Step) -> Shared:
    """Made once for all blocks: the angles of rotary positions, the mask of eager attention."""
    angles = angles_of_positions(step) if step.structure.positions == "rotary" else []
    return [*angles, causal_mask(step)] if step.structure.attention == "eager" else angles


def causal_mask(step: Step) -> Tensor:
    """One byte a pair of tokens: all of them first, then those above the diagonal."""
    everything = step.tape.tensor("1", "s·s")
    above = step.tape.tensor("1", "s·s")
    del everything
    return above


def angles_of_positions(step: Step) -> Shared:
    """Cosine and sine of every position's angles."""
    return [step.tape.tensor("c", "s·d") for _ in range(2)]


def loss_phase(step: Step, network: Network) -> Tensor:
    """Forward and loss, as `Training._loss` runs them: the logits go when it returns."""
    tape = step.tape
    with step.autocast():
        out = call(network.head, network.features()) if step.structure.chunks == 1 else network.features()
        tape.phase = tape.place = "loss"
        tape.mark(("loss", "loss"))
        return scaled(step, mean_loss(step, network.head, out))


def tell(structure: Structure) -> Tape:
    """The tape of forward, loss and backward of one micro-batch."""
    step = Step(structure)
    network = Network(step)
    tape = step.tape
    loss = loss_phase(step, network)
    tape.phase = "backward"
    tape.mark(("backward", "loss"))
    top = scaled_up(step, loss) if structure.loss_scaling else loss
    ones = Gradient(tape.make("4·1"), "4·1")
    tape.backward(root(top), ones.again())
    del ones, loss, top  # held until backward has ended
    return tape
