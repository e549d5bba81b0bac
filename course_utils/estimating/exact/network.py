"""The network and the step of `networks/transformer.py` and `measuring/step.py`, operation by operation.

This folder mirrors `networks/`, whose modules torch runs, in their names and in the order of their
operations: `network` is `transformer`, `layers` has `mlp` and the linear layers of `lora` and `frozen`,
`recomputation` is `recompute`, and `attention`, `experts` and `loss` are themselves. A change there needs the
same change here; tests/test_tape.py compares the two allocation by allocation.
"""

from .attention import Attention, Shared
from .experts import Experts
from .layers import MLP, Linear, Norm
from .loss import mean_loss, scaled_up
from .operations import Module, Step, Weight, add, dropout, new_gradients, scaled
from .recomputation import Offloading, checkpoint
from .structure import Structure
from .tape import END, HEAD, LOSS, Place, Saving, Tape, Tensor, operation


class Block(Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.norm1 = Norm(step, "norm1")
        self.attention = Attention(step)
        self.norm2 = Norm(step, "norm2")
        self.mlp = Experts(step) if step.structure.experts else MLP(step)

    @operation
    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        x = self.tape.hold(add(self.step, x, self.attention(self.norm1(x), shared)))
        return add(self.step, x, self.mlp(self.norm2(x)))


class Network(Module):
    """The whole: embeddings, blocks in groups, final norm, head."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.embedding = Weight(step, "V·h")
        self.positions = Weight(step, "P·h")
        self.groups = [[Block(step) for _ in range(size)] for size in self.structure.groups]
        self.norm = Norm(step, "final norm")
        self.head = Linear(step, "head", "h", "V", bias=False)
        if self.structure.tied:
            self.head.weight = self.embedding

    @operation
    def features(self) -> Tensor:
        """Everything before the head."""
        step = self.step
        x = embedded(step, self.embedding)
        if self.structure.positions == "learned":
            x = add(step, x, looked_up(step, self.positions, self.tape.tensor("8", "s")))
        x = self.blocks(dropout(step, x, "embedding"), shared_by_blocks(step))
        self.tape.enter(HEAD)
        return self.norm(x)

    @operation
    def blocks(self, x: Tensor, shared: Shared) -> Tensor:
        """The blocks, group by group, keeping for backward what the run says."""
        step, recompute = self.step, self.structure.recompute
        offloading = Offloading(step, shared)
        for number, blocks in enumerate(self.groups):
            self.tape.enter(Place("block", number))
            arguments = (step, number, blocks, x, shared)
            if recompute in ("blocks", "selective"):
                x = checkpoint(step, run_group, *arguments, keep_products=recompute == "selective")
            elif recompute == "offload":
                with self.tape.packing(offloading.pack):
                    x = run_group(*arguments)
            else:
                x = run_group(*arguments)
        return x


@operation
def run_group(step: Step, number: int, blocks: list[Block], x: Tensor, shared: Shared) -> Tensor:
    """One group of blocks, one after the other."""
    for position, block in enumerate(blocks):
        if position:
            step.tape.enter(Place("block", number, position))
        x = block(x, shared)
    return x


@operation
def embedded(step: Step, table: Weight) -> Tensor:
    """Rows of the table, one per token. Its gradient is dense, V·h, though a batch touches few rows."""
    leaf = table.use()
    return new_gradients(step, step.tape.tensor(table.element, "sb·h"), [leaf])


@operation
def looked_up(step: Step, table: Weight, indices: Tensor) -> Tensor:
    """Rows of the positions' table, one per position; saves the indices."""
    leaf = table.use()
    saving = [Saving(indices, "positions", "position indices", "which rows get a gradient")]
    return new_gradients(step, step.tape.tensor(table.element, "s·h"), [leaf], saving)


def shared_by_blocks(step: Step) -> Shared:
    """Made once for all blocks: cosine and sine of rotary positions' angles, the mask of eager attention."""
    shared: Shared = []
    if step.structure.positions == "rotary":
        shared += [step.tape.tensor("c", "s·d") for _ in range(2)]
    if step.structure.attention == "eager":
        shared.append(causal_mask(step))
    return shared


@operation
def causal_mask(step: Step) -> Tensor:
    """One byte per pair of tokens: all of them first, then those above the diagonal."""
    _ = step.tape.tensor("1", "s·s")
    above = step.tape.tensor("1", "s·s")
    return above


@operation
def loss_phase(step: Step, network: Network) -> Tensor:
    """Forward and loss, as `Training._loss` runs them: the logits are freed when it returns."""
    with step.autocast():
        out = network.features()
        if step.structure.chunks == 1:
            out = network.head(out)
        out = step.tape.hold(out)
        step.tape.begin("loss", LOSS)
        return scaled(step, mean_loss(step, network.head, out))


def tape_of(structure: Structure) -> Tape:
    """The tape of forward, loss and backward of one micro-batch."""
    step = Step(structure)
    train(step)
    return step.tape


@operation
def train(step: Step) -> tuple[()]:
    """Forward, loss and backward. The loss and its gradient are held until backward has ended."""
    tape = step.tape
    loss = tape.hold(loss_phase(step, Network(step)))
    tape.begin("backward", LOSS)
    top = scaled_up(step, loss) if step.structure.loss_scaling else loss
    ones = tape.gradient("4·1")
    tape.backward(top, ones.again())
    tape.begin("backward", END)
    ones.storage.release()
    return ()
