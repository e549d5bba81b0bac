"""The checks of lesson 12: right answers of every style pass, each wrong answer gets the hint it deserves."""

from collections.abc import Callable
from typing import Any

import torch
from checking import Answers, JudgedAnswers

from course_utils.allocator.policy import CachingAllocator
from course_utils.lessons.allocator import checks as lesson_12
from course_utils.lessons.allocator.checks import LEAKS, process, snapshot
from course_utils.units import MiB


def one_step(model: Any, optimizer: Any, x: Any) -> None:
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def training(
    read: Callable[[], Any] = lambda: torch.cuda.max_memory_allocated(),
    reset: bool = True,
    steps: int = 2,
    keep: bool = False,
) -> Any:
    """A learner's loop with another counter, no reset, other steps, or all models in a list."""

    def answer(make: Any, draw: Any, batches: list[int]) -> dict[int, Any]:
        found = {}
        kept = list[Any]()
        for batch in batches:
            model = make()
            optimizer = torch.optim.AdamW(model.parameters())
            if reset:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(steps):
                one_step(model, optimizer, draw(batch))
            found[batch] = read()
            if keep:
                kept += [model, optimizer]
        return found

    return answer


def in_a_function(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    def alone(batch: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = make()
        optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-4)
        x = draw(batch)
        for _ in range(2):
            one_step(model, optimizer, x)
        return torch.cuda.max_memory_allocated()

    return {batch: alone(batch) for batch in batches}


def by_statistics(make: Any, draw: Any, batches: list[int]) -> dict[int, float]:
    found = {}
    model: Any = None
    optimizer: Any = None
    loss: Any = None
    for batch in batches:
        del model, optimizer, loss
        torch.cuda.memory.reset_peak_memory_stats()
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = model(draw(batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[batch] = float(torch.cuda.memory_stats()["allocated_bytes.all.peak"])
    return found


def with_names(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """The most ordinary loop: output and loss have names, and live through backward."""
    found = {}
    for batch in batches:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            x = draw(batch)
            output = model(x)
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[batch] = torch.cuda.max_memory_allocated()
    return found


def difference(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """What was there before is subtracted: nothing of earlier trainings is left but workspaces."""
    found = {}
    for batch in batches:
        before = torch.cuda.memory_allocated()
        found |= training()(make, draw, [batch])
        found[batch] -= before
    return found


def labeled(make: Any, draw: Any, batches: list[int]) -> dict[str, int]:
    return {str(batch): size for batch, size in training()(make, draw, batches).items()}


def extra_alone(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """The lesson's `extra`: what the second step takes, without what was there before."""
    found = {}
    for batch in batches:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        one_step(model, optimizer, draw(batch))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        one_step(model, optimizer, draw(batch))
        found[batch] = torch.cuda.max_memory_allocated() - before
    return found


def with_losses(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """Keeps every loss, as one does for a plot."""
    found = {}
    losses = []
    for batch in batches:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            loss = model(draw(batch)).square().mean()
            losses.append(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found[batch] = torch.cuda.max_memory_allocated()
    return found


def one_model(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """Goes on with the model that it has."""
    model = make()
    return training()(lambda: model, draw, batches)


def largest_segments(make: Any, draw: Any, batches: list[int]) -> dict[int, int]:
    """The most reserved, where nothing was cached before."""
    found = {}
    for batch in batches:
        torch.cuda.empty_cache()
        found |= training(lambda: torch.cuda.max_memory_reserved())(make, draw, [batch])
    return found


PEAKS = Answers(
    right=[training(), in_a_function, by_statistics, with_names],
    wrong=[
        (training(reset=False), "one maximum since the process began"),
        (training(lambda: torch.cuda.memory_allocated()), "weights and states"),
        (training(lambda: torch.cuda.memory_reserved()), "keeps what earlier trainings took"),
        (training(lambda: torch.cuda.max_memory_reserved()), "keeps what earlier trainings took"),
        (training(keep=True), "Earlier trainings are still in memory"),
        (with_losses, "a loss that you keep holds its graph"),
        (one_model, "You train one model for all batch sizes"),
        (largest_segments, "These are whole segments"),
        (training(steps=1), "the first step's peak"),
        (extra_alone, "You subtract what was there before"),
        (difference, "short by cuBLAS's workspaces"),
        (labeled, "keys are texts"),
        (training(lambda: torch.cuda.max_memory_allocated() / 1e6), "MB where bytes were asked"),
        (training(lambda: 10**8), "Some peak is off"),
        (lambda make, draw, batches: {batch: make() and 1 for batch in batches[:1]}, "no 4096"),
        (lambda make, draw, batches: make().weights, "raised AttributeError"),
    ],
)


def test_the_planted_report_does_not_move_and_the_true_one_does() -> None:
    planted = lesson_12.planted_report()
    allocated = process().replayed.allocated
    true = {label: max(allocated[first:last]) for label, (first, last) in process().spans.items()}
    assert len(set(planted.values())) == 1
    assert list(true.values()) == sorted(set(true.values()), reverse=True) and true["32"] > 4 * true["4"]


def filled(
    size: float, keep: Callable[[int], bool], late: float = 0.0, share: float = 0.0, over: int = 1
) -> Any:
    """Tensors of `size` MiB fill the GPU, those stay that `keep` names; `late` MiB or a `share` come last."""

    def answer(capacity: int) -> list[tuple[int, str]]:
        bytes_ = int(size * MiB)
        made = [(bytes_, f"t{index}") for index in range(over * capacity // bytes_)]
        freed = [(-bytes_, name) for index, (_, name) in enumerate(made) if not keep(index)]
        return [*made, *freed, (int(late * MiB + share * capacity), "late")]

    return answer


one_a_segment = filled(4, lambda index: index % 5 == 0, late=17)

FRAGMENTED = Answers(
    right=[
        one_a_segment,
        lambda capacity: tuple(filled(4, lambda index: index % 5 in (0, 4), late=13)(capacity)),
        filled(4, lambda index: index % 5 in (1, 3), late=5),
        filled(2, lambda index: index % 10 == 0, late=20),
    ],
    wrong=[
        (filled(4, lambda index: index % 2 == 0, late=4), "everything fits"),
        (filled(4, lambda index: index % 10 > 0, late=8), "not more than half"),
        # the lesson's pattern
        (filled(4, lambda index: index % 5 in (0, 2, 4), late=8), "not more than half"),
        (filled(4, lambda index: index % 2 == 0, late=8), "not more than half"),
        (filled(4, lambda index: index % 2 == 0, share=1), "for more than all that is free"),
        (filled(4, lambda index: index % 2 == 0, late=8, over=2), "before the last request"),
        (filled(4, lambda index: index % 5 in (0, 4), share=0.6), "all that is free."),
        (lambda capacity: one_a_segment(80 * MiB), "On a GPU of 200 MiB everything fits"),
        (lambda capacity: [(-4, "a")], "Your events do not work"),
    ],
)


def sorted_by(key: Callable[[int], int], back: bool = True) -> Any:
    """Features made in the order of `key` over the places, and put where they belong, or not."""

    @torch.no_grad()
    def answer(model: Any, documents: list[Any]) -> list[Any]:
        places = sorted(range(len(documents)), key=lambda at: key(len(documents[at])))
        made = [model(documents[at]) for at in places]
        return [made[places.index(at)] for at in range(len(documents))] if back else made

    return answer


longest_first = sorted_by(lambda length: -length)


def forward(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens) for tokens in documents]


in_turn = torch.no_grad()(forward)


@torch.no_grad()
def from_behind(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens) for tokens in documents[::-1]][::-1]


@torch.no_grad()
def room_first(model: Any, documents: list[Any]) -> tuple[Any, ...]:
    width = model[-1].out_features
    features = tuple(torch.empty(len(tokens), width, device=tokens.device) for tokens in documents)
    for room, tokens in zip(features, documents, strict=True):
        room.copy_(model(tokens))
    return features


@torch.no_grad()
def in_one_buffer(model: Any, documents: list[Any]) -> list[Any]:
    sizes = [len(tokens) for tokens in documents]
    buffer = torch.empty(sum(sizes), model[-1].out_features, device=documents[0].device)
    for room, tokens in zip(buffer.split(sizes), documents, strict=True):
        room[:] = model(tokens)
    return list(buffer.split(sizes))


@torch.no_grad()
def replaced(model: Any, documents: list[Any]) -> list[Any]:
    features = [
        torch.empty(len(tokens), model[-1].out_features, device=tokens.device) for tokens in documents
    ]
    rooms = list(features)
    for at, tokens in enumerate(documents):
        features[at] = model(tokens)
    assert len(rooms) == len(features)
    return features


@torch.no_grad()
def emptied(model: Any, documents: list[Any]) -> list[Any]:
    features = []
    for tokens in documents:
        features.append(model(tokens))
        torch.cuda.empty_cache()
    return features


@torch.no_grad()
def at_once(model: Any, documents: list[Any]) -> list[Any]:
    return list(model(torch.cat(documents)).split([len(tokens) for tokens in documents]))


@torch.no_grad()
def longest_first_for_nothing(model: Any, documents: list[Any]) -> list[Any]:
    model(max(documents, key=len))
    return in_turn(model, documents)


def rounded(model: Any, documents: list[Any]) -> list[Any]:
    return [feature.half().float() for feature in longest_first(model, documents)]


@torch.no_grad()
def there_and_back(model: Any, documents: list[Any]) -> list[Any]:
    features = [model(tokens).cpu() for tokens in documents]
    return [feature.to(tokens.device) for feature, tokens in zip(features, documents, strict=True)]


@torch.no_grad()
def by_length(model: Any, documents: list[Any]) -> list[Any]:
    found = {len(tokens): model(tokens) for tokens in documents[::-1]}
    return [found[len(tokens)] for tokens in documents]


@torch.no_grad()
def in_pieces(model: Any, documents: list[Any]) -> list[Any]:
    whole = sorted_by(lambda length: -length)
    return whole(lambda tokens: torch.cat([model(piece) for piece in tokens.split(1000)]), documents)


@torch.no_grad()
def copied_at_the_end(model: Any, documents: list[Any]) -> list[Any]:
    return list(torch.cat(longest_first(model, documents)).split([len(tokens) for tokens in documents]))


def half(model: Any, documents: list[Any]) -> list[Any]:
    return [feature.half() for feature in longest_first(model, documents)]


@torch.no_grad()
def to_the_host(model: Any, documents: list[Any]) -> list[Any]:
    return [model(tokens).cpu() for tokens in documents]


@torch.no_grad()
def by_first_and_last(model: Any, documents: list[Any]) -> list[Any]:
    """Looks at two documents alone."""
    rising = len(documents[0]) < len(documents[-1])
    return from_behind(model, documents) if rising else in_turn(model, documents)


@torch.no_grad()
def wrong_way_back(model: Any, documents: list[Any]) -> list[Any]:
    """Takes the order for its own inverse."""
    places = sorted(range(len(documents)), key=lambda at: len(documents[at]), reverse=True)
    made = [model(documents[at]) for at in places]
    return [made[at] for at in places]


@torch.no_grad()
def padded(model: Any, documents: list[Any]) -> list[Any]:
    """Room for as many tokens as the longest document has, for each."""
    longest = max(map(len, documents))
    room = torch.empty(len(documents), longest, model[-1].out_features, device=documents[0].device)
    for row, tokens in zip(room, documents, strict=True):
        row[: len(tokens)] = model(tokens)
    return [row[: len(tokens)] for row, tokens in zip(room, documents, strict=True)]


EMBED = Answers(
    right=[longest_first, room_first, in_one_buffer],
    wrong=[
        (in_turn, "too small for the next document"),
        (sorted_by(lambda length: length), "too small for the next document"),
        (emptied, "nor `empty_cache`"),
        (from_behind, "you rely on their order"),
        (by_first_and_last, "first rise, then fall: you rely on their order"),
        (wrong_way_back, "in the order that you made them"),
        (padded, "more room than all features need"),
        (longest_first_for_nothing, "the model once for each document"),
        (at_once, "the whole document and no other"),
        (rounded, "Your features are rounded"),
        (there_and_back, "stay on the GPU"),
        (replaced, "does `features[i] = …` replace"),
        (sorted_by(lambda length: -length, back=False), "in the order that you made them"),
        (by_length, "two documents may have the same length"),
        (in_pieces, "the whole document and no other"),
        (copied_at_the_end, "is copied in the end"),
        (half, "Return the features in fp32"),
        (to_the_host, "stay on the GPU"),
        (forward, "carry a graph"),
        (lambda model, documents: in_turn(model, documents[1:]), "one tensor of features for each"),
        (lambda model, documents: documents.reverse() or in_turn(model, documents), "changes argument 2"),
    ],
)


def living(content: Any) -> list[tuple[str, str, int]]:
    """Module, moment and bytes of each living block."""
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    return [
        (block["frames"][0]["filename"], block["frames"][1]["filename"], block["size"])
        for block in blocks
        if block["state"] == "active_allocated"
    ]


def by_counting(snapshot: Any) -> str | None:
    """By sorted pairs of module and step."""
    pairs = {(made_by, when.split()[1]) for made_by, when, _ in living(snapshot)}
    names = [name for name, _ in pairs]
    return next((name for name in sorted(names) if names.count(name) >= 3), None)


def by_forwards(snapshot: Any) -> str | None:
    """What forwards made, in more than one step."""
    found: dict[str, set[str]] = {}
    for made_by, when, _ in living(snapshot):
        if "forward" in when:
            found.setdefault(made_by, set()).add(when)
    return next((made_by for made_by, moments in found.items() if len(moments) > 1), None)


def in_every_step(snapshot: Any) -> str | None:
    made = [
        {made_by for made_by, when, _ in living(snapshot) if when.startswith(f"step {step} ")}
        for step in (1, 2, 3, 4, 5)
    ]
    return next(iter(set.intersection(*made)), None)


def of_two_steps(snapshot: Any) -> str | None:
    pairs = {(made_by, when) for made_by, when, _ in living(snapshot)}
    names = sorted(name for name, _ in pairs)
    return next((name for name in names if names.count(name) >= 2), None)


def without_the_set_up(snapshot: Any) -> str | None:
    pairs = {(made_by, when.split()[1]) for made_by, when, _ in living(snapshot)} - {None}
    names = sorted(name for name, step in pairs if step != "0")
    return next((name for name in names if names.count(name) > 1), None)


def of_two_moments(snapshot: Any) -> str | None:
    """Modules alone, and yet one too many."""
    names = sorted(made_by for made_by, _, _ in living(snapshot) if "." not in made_by)
    return next((name for name in names if names.count(name) >= 1), None)


def largest(snapshot: Any) -> str:
    return max(living(snapshot), key=lambda block: block[2])[0]


def first_of_step_3(snapshot: Any) -> str | None:
    return next((made_by for made_by, when, _ in living(snapshot) if when.startswith("step 3")), None)


def where_something_leaks(answer: Any) -> Any:
    return lambda snapshot: answer(snapshot) if by_counting(snapshot) else None


NONE_THERE = "You find a leak where there is none"

LEAK = Answers(
    right=[by_counting, by_forwards, without_the_set_up],
    wrong=[
        (largest, NONE_THERE),
        (of_two_steps, "'first.bias', which is not a module"),
        (of_two_moments, "Step 0 is the set-up"),
        (in_every_step, "You find nothing"),
        (first_of_step_3, NONE_THERE),
        (where_something_leaks(of_two_steps), "its gradient in step 5. Which steps count?"),
        (where_something_leaks(lambda snapshot: "exp_avg of last.bias"), "made in one step"),
        (where_something_leaks(largest), "made in one step"),
        (where_something_leaks(first_of_step_3), "made in one step"),
        (
            lambda snapshot: None if by_counting(snapshot) == "last" else by_counting(snapshot),
            "You find nothing",
        ),
        (where_something_leaks(lambda snapshot: f"addmm in {by_counting(snapshot)}"), "is not the module"),
        (lambda snapshot: "last", "whatever the snapshot says"),
    ],
)


def test_the_example_is_a_snapshot_of_five_steps() -> None:
    steps = {when.split()[1] for _, when, _ in living(lesson_12.example_snapshot())}
    assert steps == {"0", "1", "2", "3", "4", "5"}
    assert [by_counting(snapshot(module)) for module in LEAKS] == [*LEAKS]


class Plain:
    """An allocator as a learner writes one, from lists of [size, name]; each class below has one mistake."""

    # a rest of so many bytes is split off
    least_small = 1
    least_large = MiB + 1
    step = 2 * MiB
    shared = 20 * MiB
    alone = 10 * MiB
    limit = MiB

    def __init__(self) -> None:
        self.segments: list[list[list[Any]]] = []
        self.pools: list[bool] = []

    reserved = property(lambda self: sum(size for blocks in self.segments for size, _ in blocks))
    allocated = property(lambda self: sum(size for blocks in self.segments for size, name in blocks if name))

    def rounded(self, size: int) -> int:
        return (size + 511) // 512 * 512

    def is_small(self, size: int) -> bool:
        return size <= self.limit

    def segment(self, size: int) -> int:
        if self.is_small(size):
            return 2 * MiB
        if size < self.alone:
            return self.shared
        return (size + self.step - 1) // self.step * self.step

    def usable(self, small: bool) -> list[list[list[Any]]]:
        return [blocks for blocks, pool in zip(self.segments, self.pools, strict=True) if pool == small]

    def fitting(self, size: int, small: bool) -> list[list[Any]]:
        return [one for blocks in self.usable(small) for one in blocks if one[1] is None and one[0] >= size]

    def choose(self, free: list[list[Any]]) -> list[Any]:
        return min(free, key=lambda one: one[0])

    def allocate(self, name: Any, size: int) -> None:
        size = self.rounded(size)
        small = self.is_small(size)
        free = self.fitting(size, small)
        if not free:
            self.segments.append([[self.segment(size), None]])
            self.pools.append(small)
            free = self.segments[-1]
        one = self.choose(free)
        rest = one[0] - size
        if rest >= (self.least_small if small else self.least_large):
            blocks = next(blocks for blocks in self.segments if any(other is one for other in blocks))
            at = next(at for at, other in enumerate(blocks) if other is one)
            blocks.insert(at + 1, [rest, None])
            one[0] = size
        one[1] = name

    def free(self, name: Any) -> None:
        for blocks in self.segments:
            for at, one in enumerate(blocks):
                if one[1] == name:
                    one[1] = None
                    self.join(blocks, at)
                    return

    def join(self, blocks: list[list[Any]], at: int) -> None:
        self.right(blocks, at)
        self.left(blocks, at)

    def right(self, blocks: list[list[Any]], at: int) -> None:
        if at + 1 < len(blocks) and blocks[at + 1][1] is None:
            blocks[at][0] += blocks.pop(at + 1)[0]

    def left(self, blocks: list[list[Any]], at: int) -> None:
        if at and blocks[at - 1][1] is None:
            self.right(blocks, at - 1)


def mistaken(base: Any = Plain, **what: Any) -> Any:
    """The allocator with a method or a number of its own."""
    return type("Mistaken", (base,), what)


class ByAddress:
    """Another style: blocks by address in one dictionary for each segment, its counters kept up to date."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self.free_blocks: list[tuple[int, int, int]] = []  # size, segment's number, offset
        self.used: dict[Any, tuple[int, int, int]] = {}
        self.small: list[bool] = []

    def allocate(self, name: Any, size: int) -> None:
        size = -(-size // 512) * 512
        small = size <= MiB
        fitting = [one for one in self.free_blocks if one[0] >= size and self.small[one[1]] == small]
        if fitting:
            best = min(fitting)
            self.free_blocks.remove(best)
        else:
            if small:
                taken = 2 * MiB
            elif size < 10 * MiB:
                taken = 20 * MiB
            else:
                taken = -(-size // (2 * MiB)) * 2 * MiB
            self.reserved += taken
            best = (taken, len(self.small), 0)
            self.small.append(small)
        whole, segment, offset = best
        if whole - size > (0 if small else MiB):
            self.free_blocks.append((whole - size, segment, offset + size))
            whole = size
        self.used[name] = (whole, segment, offset)
        self.allocated += whole

    def free(self, name: Any) -> None:
        size, segment, offset = self.used.pop(name)
        self.allocated -= size
        for other in list(self.free_blocks):
            if other[1] == segment and other[2] + other[0] == offset:
                self.free_blocks.remove(other)
                size = size + other[0]
                offset = other[2]
            elif other[1] == segment and offset + size == other[2]:
                self.free_blocks.remove(other)
                size += other[0]
        self.free_blocks.append((size, segment, offset))


class ThePolicy:
    """By the course's own allocator, as one who has found it."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.addresses = dict[Any, int]()

    allocated = property(lambda self: float(self.allocator.allocated))
    reserved = property(lambda self: self.allocator.reserved)

    def allocate(self, name: Any, size: int) -> int:
        self.addresses[name] = self.allocator.malloc(size)
        return self.addresses[name]

    def free(self, name: Any) -> None:
        self.allocator.free(self.addresses.pop(name))


def first_segment_that_has_one(self: Any, size: int, small: bool) -> list[Any]:
    found = [[one for one in blocks if one[1] is None and one[0] >= size] for blocks in self.usable(small)]
    return next(filter(None, found), [])


class AcrossSegments(Plain):
    def free(self, name: Any) -> None:
        super().free(name)
        for at in range(len(self.segments) - 1, 0, -1):
            before, after = self.segments[at - 1 : at + 1]
            whole = len(before) == len(after) == 1 and before[0][1] is after[0][1] is None
            if whole and self.pools[at - 1] == self.pools[at]:
                before[0][0] += after[0][0]
                del self.segments[at], self.pools[at]


class GivesBack(Plain):
    def free(self, name: Any) -> None:
        super().free(name)
        empty = [at for at, blocks in enumerate(self.segments) if len(blocks) == 1 and blocks[0][1] is None]
        for at in reversed(empty):
            del self.segments[at], self.pools[at]


def forgets(self: Any, name: Any) -> None:
    """Takes the block out of its segment."""
    for blocks in self.segments:
        blocks[:] = [one for one in blocks if one[1] != name]


def never_free(self: Any, name: Any) -> None:
    """Nothing is taken back."""


def never_joins(self: Any, *_: Any) -> None:
    """Blocks stay as they are."""


def only_before(self: Any, blocks: Any, at: int) -> None:
    """Joins with the free neighbor before alone."""
    if at and blocks[at - 1][1] is None:
        Plain.right(self, blocks, at - 1)


def only_small_alone(self: Any, small: bool) -> Any:
    """Small requests keep to their pool, large ones take any block."""
    return [blocks for blocks, pool in zip(self.segments, self.pools, strict=True) if pool or not small]


def one_or_the_other(self: Any, blocks: Any, at: int) -> None:
    before = len(blocks)
    self.right(blocks, at)
    if len(blocks) == before:
        self.left(blocks, at)


def by_request(self: Any, name: Any, size: int) -> None:
    """Chooses the segment by the request, not by what it is rounded to."""
    shared = self.alone
    self.alone = 0 if size >= 10 * MiB else 10 * MiB + 512
    Plain.allocate(self, name, size)
    self.alone = shared


class NewestInFront(Plain):
    """New segments get to the front of their pool."""

    def allocate(self, name: Any, size: int) -> None:
        before = len(self.segments)
        super().allocate(name, size)
        if len(self.segments) > before:
            self.segments.insert(0, self.segments.pop())
            self.pools.insert(0, self.pools.pop())


def rest_in_front(self: Any, name: Any, size: int) -> None:
    """The block at the end of what was free, and the rest before it."""
    Plain.allocate(self, name, size)
    for blocks in self.segments:
        for at, one in enumerate(blocks[:-1]):
            if one[1] == name and blocks[at + 1][1] is None:
                blocks[at : at + 2] = [blocks[at + 1], one]
                return


def around_the_end(self: Any, blocks: Any, at: int) -> None:
    """Joins with the block at −1, which for the first block is the last one, or the block itself."""
    if blocks[at - 1][1] is None:
        blocks[at - 1][0] += blocks.pop(at)[0]


class Lost(Plain):
    """Appends to a list that nobody keeps, as `pool = self.small + self.large` is."""

    def allocate(self, name: Any, size: int) -> None:
        segments = self.segments
        self.segments = list(self.segments)
        super().allocate(name, size)
        self.segments = segments
        self.pools = self.pools[: len(segments)]


def largest_first(self: Any, free: Any) -> Any:
    return max(free, key=lambda one: one[0])


WITHOUT_FREE = {name: what for name, what in vars(Plain).items() if name != "free"}

ALLOCATOR = Answers(
    right=[Plain, ByAddress, ThePolicy],
    wrong=[
        (mistaken(choose=lambda self, free: free[0]), "Best fit, not first fit"),
        (mistaken(choose=largest_first), "Best fit, not first fit"),
        (mistaken(choose=lambda self, free: free[-1]), "Best fit, not the newest"),
        (mistaken(fitting=first_segment_that_has_one), "searches every segment"),
        (
            mistaken(choose=lambda self, free: min(free[::-1], key=lambda one: one[0])),
            "Of several equally small free",
        ),
        (
            mistaken(usable=lambda self, small: Plain.usable(self, small)[::-1]),
            "use the one in the oldest segment",
        ),
        (NewestInFront, "use the one in the oldest segment"),
        (mistaken(allocate=rest_in_front), "split the rest off *behind* your block"),
        (mistaken(left=around_the_end), "You join blocks that are not neighbors"),
        (Lost, "After a request nothing is reserved"),
        (mistaken(join=never_joins), "You never join"),
        (mistaken(left=never_joins), "the free neighbor before"),
        (mistaken(right=never_joins, left=only_before), "the free neighbor behind"),
        (mistaken(join=one_or_the_other), "all three become one"),
        (AcrossSegments, "You join across segments"),
        (mistaken(least_large=10**18, least_small=10**18), "You never split"),
        (mistaken(least_small=MiB + 1), "In the small pool every rest"),
        (mistaken(least_large=512), "You always split"),
        (mistaken(least_large=10**18), "You never split in the large pool"),
        (mistaken(is_small=lambda self, size: not self.segments or size <= MiB), "compare them with `is`"),
        (
            mistaken(
                segment=lambda self, size: 2 * MiB if size <= MiB else -(-size // (20 * MiB)) * 20 * MiB
            ),
            "From 10 MiB on, a segment is the request",
        ),
        (mistaken(free=forgets), "A freed block stays in its segment"),
        (type("First", (), WITHOUT_FREE), "Now write the half that frees"),
        (type("Split", (), WITHOUT_FREE | {"least_large": 512}), "You always split"),
        (mistaken(least_large=MiB), "A rest of exactly 1 MiB"),
        (mistaken(least_large=2 * MiB), "a rest of more than 1 MiB is split off"),
        (mistaken(rounded=lambda self, size: size), "You do not round up"),
        (
            mistaken(rounded=lambda self, size: (size // 512 + 1) * 512),
            "A multiple of 512 bytes stays as it is",
        ),
        (mistaken(segment=lambda self, size: size), "small blocks share 2 MiB"),
        (
            mistaken(segment=lambda self, size: 20 * MiB if size < 10 * MiB else size),
            "small blocks share 2 MiB",
        ),
        (mistaken(alone=0), "blocks under 10 MiB share"),
        (mistaken(is_small=lambda self, size: size < MiB), "exactly 1 MiB is small"),
        (mistaken(allocate=by_request), "You choose by the requested size"),
        (mistaken(alone=10 * MiB + 512), "exactly 10 MiB gets"),
        (mistaken(step=512), "multiples of 2 MiB"),
        (mistaken(fitting=lambda self, size, small: []), "You ask the driver although"),
        (mistaken(free=never_free), "You do not reuse freed blocks"),
        (GivesBack, "You give memory back"),
        (mistaken(usable=lambda self, small: self.segments), "takes no block of the large pool"),
        (mistaken(usable=only_small_alone), "takes no block of the small pool"),
        (mistaken(free=lambda self, name: self.lost), "raised AttributeError"),
        (type("Half", (), {"__init__": Plain.__init__}), "Your allocator has no `allocate`"),
        (
            mistaken(segment=lambda self, size: 40 * MiB if size > 31 * MiB else Plain.segment(self, size)),
            "of a longer trace",
        ),
    ],
)


ANSWERS = {"12.1": PEAKS, "12.2": FRAGMENTED, "12.3": EMBED, "12.4": LEAK, "12.5": ALLOCATOR}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS
