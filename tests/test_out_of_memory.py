"""Does `oom` read every kind of out-of-memory message, and does it name the cause that each was made of?"""

import io
import re
import sys
import tomllib
import traceback
from argparse import ArgumentParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from course_utils.units import GiB, MiB
from course_utils.watching.out_of_memory import (
    TEXTS,
    Diagnosis,
    OutOfMemory,
    diagnose,
    options,
    parse,
    parse_log,
    run,
)

ADVICE = (
    " If reserved but unallocated memory is large"
    " try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. "
    " See documentation for Memory Management "
    " (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 MiB. "
    "GPU 0 has a total capacity of 15.83 GiB of which 182.46 MiB is free. "
    "Including non-PyTorch memory, this process has 15.65 GiB memory in use. "
    "Of the allocated memory 15.07 GiB is allocated by PyTorch, "
    "and 2.88 MiB is reserved by PyTorch but unallocated." + ADVICE
)
OTHERS = (
    "CUDA out of memory. Tried to allocate 576.00 MiB. "
    "GPU 0 has a total capacity of 31.36 GiB of which 370.69 MiB is free. "
    "Process 16335 has 20.34 GiB memory in use. Process 16336 has 5.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 5.55 GiB memory in use. "
    "Of the allocated memory 4.89 GiB is allocated by PyTorch, "
    "and 77.08 MiB is reserved by PyTorch but unallocated." + ADVICE
)
CONTAINER = (  # torch 2.1 to 2.2 in a container: its own process by a number, and "capacty"
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. "
    "GPU 0 has a total capacty of 14.75 GiB of which 1.66 GiB is free. "
    "Process 414660 has 13.09 GiB memory in use. "
    "Of the allocated memory 10.09 GiB is allocated by PyTorch, "
    "and 1.92 GiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large "
    "try setting max_split_size_mb to avoid fragmentation.  "
    "See documentation for Memory Management and PYTORCH_"
)
FRACTION = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. "
    "GPU 0 has a total capacity of 15.83 GiB of which 8.25 GiB is free. "
    "7.92 GiB allowed; Of the allocated memory 7.00 GiB is allocated by PyTorch, "
    "and 0 bytes is reserved by PyTorch but unallocated." + ADVICE
)
OLD = (  # torch 1.4 to 2.0
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB "
    "(GPU 0; 15.78 GiB total capacity; 14.56 GiB already allocated; 14.44 MiB free; "
    "15.06 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory "
    "try setting max_split_size_mb to avoid fragmentation."
)
AMD = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 978.00 MiB. "
    "GPU 0 has a total capacity of 15.98 GiB of which 630.00 MiB is free. "
    "Of the allocated memory 0 bytes is allocated by PyTorch, "
    "and 0 bytes is reserved by PyTorch but unallocated."
)
APPLE = (
    "RuntimeError: MPS backend out of memory "
    "(MPS allocated: 17.25 GB, other allocations: 512.00 MB, max allowed: 18.00 GB). "
    "Tried to allocate 320.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable it"
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
    "can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
NO_SIZES = "torch.AcceleratorError: CUDA error: out of memory"


def gib(amount: float) -> int:
    return round(amount * GiB)


def mib(amount: float) -> int:
    return round(amount * MiB)


def sizes(requested: int, total: int, free: int, **others: int) -> dict[str, int]:
    return {"requested": requested, "total": total, "free": free, **others}


READ = [
    (NEW, sizes(mib(256), gib(15.83), mib(182.46), allocated=gib(15.07), cached=mib(2.88), others=0)),
    (OTHERS, sizes(mib(576), gib(31.36), mib(370.69), allocated=gib(4.89), others=gib(25.34))),
    (CONTAINER, sizes(gib(1.95), gib(14.75), gib(1.66), cached=gib(1.92), others=0)),
    (FRACTION, sizes(gib(1), gib(15.83), gib(8.25), allowed=gib(7.92), cached=0)),
    (OLD, sizes(mib(20), gib(15.78), mib(14.44), allocated=gib(14.56), cached=gib(15.06) - gib(14.56))),
    (AMD, sizes(mib(978), gib(15.98), mib(630), allocated=0)),
    (APPLE, sizes(320 * MiB, 18 * GiB, 256 * MiB, allocated=gib(17.25), others=0)),
]


@pytest.mark.parametrize(("text", "expected"), READ)
def test_sizes_are_those_of_the_message_and_the_parts_add_up_to_the_card(text, expected):
    failure = parse(text)
    assert {name: failure.sizes.get(name) for name in expected} == expected
    assert parse(text.replace(" ", "\n")).sizes == failure.sizes  # a terminal's line breaks are no matter
    assert sum(failure.parts.values()) == failure.sizes["total"] and min(failure.parts.values()) >= 0


def in_traceback(*lines: str, message: str = NEW) -> str:
    """A traceback whose innermost lines these are, as torch 2.11 wrote it on a CUDA build."""
    return "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "/home/me/train.py", line 47, in <module>',
            *lines,
            message,
        ]
    )


TORCH = '  File "/env/lib/python3.11/site-packages/torch/'
CALL = (
    TORCH + 'nn/modules/module.py", line 1779, in _wrapped_call_impl',
    "    return self._call_impl(*args, **kwargs)",
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    TORCH + 'nn/modules/module.py", line 1790, in _call_impl',
    "    return forward_call(*args, **kwargs)",
)
LINEAR = (
    *CALL,
    TORCH + 'nn/modules/linear.py", line 134, in forward',
    "    return F.linear(input, self.weight, self.bias)",
)
STATES = in_traceback(
    "    optimizer.step()",
    TORCH + 'optim/adam.py", line 178, in _init_group',
    '    state["exp_avg"] = torch.zeros_like(',
    "                       ^^^^^^^^^^^^^^^^^",
)
FOREACH = in_traceback(
    "    optimizer.step()",
    TORCH + 'optim/adam.py", line 791, in _multi_tensor_adam',
    "    exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)",
)
BACKWARD = (
    "    loss.backward()",
    TORCH + 'autograd/graph.py", line 869, in _engine_run_backward',
    (
        "    return Variable._execution_engine.run_backward(  # Calls into the C++ engine to run the backward"
        " pass"
    ),
)
LARGE = NEW.replace("256.00 MiB", "4.00 GiB")
SOFTMAX = ("    scores = scores.softmax(-1)",)
LOGITS = ("    logits = self.lm_head(hidden)", *LINEAR)
EVALUATION = (
    "    accuracy = evaluate(model)",
    '  File "train.py", line 9, in evaluate',
    "    outputs = model(x)",
    *LINEAR,
)

CAUSES = {
    "allowed": [FRACTION],
    "others": [OTHERS],
    "outside": [AMD],
    "fragmented": [CONTAINER],
    "states": [STATES],
    "step": [FOREACH],
    "loss": [in_traceback("    loss = F.cross_entropy(logits, targets)"), in_traceback(*LOGITS)],
    "attention": [in_traceback(*CALL, *SOFTMAX)],
    "tensor": [LARGE, in_traceback(*BACKWARD, message=LARGE)],
    "backward": [in_traceback(*BACKWARD), in_traceback(*BACKWARD, "    return block(x)", *LINEAR)],
    "forward": [in_traceback("    logits = model(x)", *CALL, *LINEAR)],
    "evaluation": [in_traceback(*EVALUATION)],
    "load": [
        in_traceback("    net.to(device)", TORCH + 'nn/modules/module.py", line 9, in convert', "    t.to(")
    ],
    "gather": [
        in_traceback(*CALL, TORCH + 'distributed/fsdp/_fully_shard/_fsdp_param.py", line 9, in unshard')
    ],
    "grew": ["step 2350 loss 0.27\n" + in_traceback(*BACKWARD), "iteration: 12\n" + NEW],
    "full": [NEW, APPLE, "CUDA out of memory", "step 2\n" + NEW, "Resuming from step 5000\n" + NEW],
    "driver": [NO_SIZES],
    "cublas": ["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"],
    "nccl": ["NCCL error in: ProcessGroupNCCL.cpp:1\nLast error:\nFailed to CUDA calloc async 2432 bytes"],
    "host": [
        CPU,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array",
        "Loading checkpoint shards: 50%\nKilled",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123456.batch.",
        "command terminated with exit code 137",
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    ],
}


MESSAGES = tomllib.loads(Path(__file__).with_name("out_of_memory_messages.toml").read_text("utf-8"))[
    "message"
]
REPLIES = [(message["causes"][0], message["text"]) for message in MESSAGES]
MADE = [(cause, text) for cause, texts in CAUSES.items() for text in texts]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["thread"])
def test_messages_of_people_get_their_causes_from_the_right_line_and_as_surely_as_that_allows(message):
    found = diagnose(parse_log(message["text"].encode()))
    assert list(found.causes) == message["causes"], found.because
    assert message["line"] in message["text"].split("\n")[found.line - 1]
    assert found.sure == message["sure"]


@pytest.mark.parametrize("cause, text", MADE + REPLIES)
def test_the_cause_is_that_of_the_message(cause, text):
    found = diagnose(parse(text))
    assert found.cause == cause, found.because
    told = str(found)
    assert re.search(
        r"What was full\n  \S.*\n\n(?:Likely c|Possible c|C)auses?\n  \S.*\n\nThree changes\n  1\. \S",
        told,
        re.DOTALL,
    )
    assert len(re.findall(r"^  [123]\. \S.*  lesson \d\d: \S", told, re.MULTILINE)) == 3
    assert "{" not in told and max(map(len, told.splitlines())) <= 120


def made(*lines: str, **changed: float) -> str:
    """The cause for a card of 100 GiB with 1 GiB free, with these sizes in GiB and this traceback."""
    said = {"total": 100, "free": 1, "requested": 2, "allocated": 98, "cached": 0, "pools": 0, "others": 0}
    given = {name: gib(size) for name, size in (said | changed).items()}
    return diagnose(OutOfMemory("gpu", "", given, lines)).cause


def test_shares_of_the_card_decide():
    assert made(others=9, allocated=89) == "full" and made(others=11, allocated=87) == "others"
    assert made(others=11, allocated=87, requested=13) == "tensor"  # not even without them
    assert made(cached=4, allocated=94) == "full" and made(cached=6, allocated=92) == "fragmented"
    assert made(cached=6, allocated=92, requested=8) == "full"  # not even in one piece
    assert made(allocated=89) == "full" and made(allocated=87) == "outside"  # 10 % and a context
    assert made(requested=9) == "full" and made(requested=11) == "tensor"
    assert made("loss.backward()", requested=9) == "backward"
    assert made("loss.backward()", requested=11) == "tensor"
    assert made("in forward", requested=24) == "forward" and made("in forward", requested=26) == "tensor"
    assert made("x = scores", requested=1) == "attention" and made("x = scores", requested=90) == "attention"
    assert made(allowed=50, free=40, allocated=49) == "allowed" and made(allowed=50, free=1) == "full"


def test_every_cause_is_tried_and_every_change_is_some_cause_s():
    tried = CAUSES.keys() | {cause for message in MESSAGES for cause in message["causes"]}
    assert tried == TEXTS["causes"].keys()
    used = [change for cause in TEXTS["causes"].values() for change in cause["changes"]]
    assert set(used) == TEXTS["changes"].keys()
    assert all(len(set(cause["changes"])) == 3 for cause in TEXTS["causes"].values())


def test_the_last_message_of_a_log_counts_but_not_a_shorter_copy_of_it():
    shorter = "RuntimeError: CUDA out of memory. Tried to allocate 256.00 MiB.\nCUDA out of memory, giving up"
    assert parse(f"{NEW}\n{shorter}").sizes == parse(NEW).sizes
    assert parse(shorter).sizes == {"requested": mib(256), "cached": 0, "pools": 0, "others": 0}
    last = in_traceback(*BACKWARD, message=OLD)
    found = diagnose(
        parse(f"step 1\n{STATES}\nretry with half the batch\n{last}\nexitcode: 1\n" + "bye\n" * 9)
    )
    assert found.cause == "backward" and found.failure.sizes["requested"] == 20 * MiB


def test_ranks_are_told_apart_and_a_message_outranks_the_kill_that_followed():
    zero = [f"[rank0]: {line}" for line in STATES.splitlines()]
    one = [f"[rank1]: {line}" for line in in_traceback(*BACKWARD, message="ValueError: no").splitlines()]
    pairs = zip(zero, [*one, *one], strict=False)
    mixed = "\n".join(line for pair in pairs for line in pair)
    assert len(one) * 2 >= len(zero) and diagnose(parse(mixed + "\nKilled\n")).cause == "states"


def test_colours_rich_boxes_utf16_and_paths_of_windows_are_no_matter():
    boxed = "\x1b[K\x1b[31m│ " + NEW.replace(" memory. ", " memory.  │\n│ ") + " │\x1b[0m"
    assert parse(boxed).sizes == parse(NEW).sizes
    assert parse(NEW.encode("utf-16-le").decode("latin-1")).sizes == parse(NEW).sizes
    windows = STATES.replace("/home/me/train.py", r"C:\work\my model.py").replace("/env/lib", r"C:\env\lib")
    assert str(diagnose(parse(windows))).endswith("watch my model.py")
    assert '"mps"' in str(diagnose(parse(APPLE))) and '"cuda"' in str(diagnose(parse(OLD)))


def test_a_message_counts_wherever_it_is_in_a_long_log_but_not_before_a_better_one():
    line = b"step 3 loss 0.27\n"
    long = line * (6 * MiB // len(line))
    found = diagnose(parse_log(b"\n" + STATES.encode() + b"\n" + long + b"Killed\n"))
    assert (
        found.cause == "states" and found.line == 1 + STATES[: STATES.index('state["exp_avg')].count("\n") + 1
    )
    assert diagnose(parse_log(long + b"Killed\n" + long)).causes == ("host", "signal")
    split = b"." * (9 * MiB - 60) + b"\n" + NEW.encode() + b"\n" + b"." * (4 * MiB - len(NEW) + 30)
    assert parse_log(split).sizes == parse(NEW).sizes  # where two windows meet


# What is no message


@pytest.mark.parametrize(
    "text, said",
    [
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", "No out-of-memory message found"),
        ("Killed three epochs early: the loss was flat", "No out-of-memory message found"),
        ("exitcode  : 1 (pid: 4711)", "No out-of-memory message found"),
        (
            "ResourceExhaustedError: OOM when allocating tensor with shape[64,1024]",
            "Only messages of PyTorch",
        ),
    ],
)
def test_other_texts_are_refused_in_one_sentence_with_an_example(text, said):
    example = "as (?:in )?'CUDA out of memory. Tried to allocate 2.00 GiB"
    with pytest.raises(ValueError, match=f"^{said}.* {example}"):
        parse(text)


PIECES = [
    *re.split(r"(?<=[.;]) ", " ".join(text for text, _ in READ)),
    *STATES.splitlines(),
    CPU,
    NO_SIZES,
    "CUDA out of memory. ",
    "Tried to allocate ",
    "0 bytes",
    "9" * 400 + ".5 GiB",
    "step ",
    "{total}",
    "Killed",
]


def accepted(text: str) -> Diagnosis | None:
    """The diagnosis of a text; None if it is refused, in one line."""
    try:
        found = diagnose(parse(text))
    except ValueError as error:
        assert "\n" not in str(error) and str(error)
        return None
    said, parts = found.failure.sizes, found.failure.parts
    assert min(said.values()) >= 0 and all(size >= 0 for size in parts.values())
    assert not parts or sum(parts.values()) >= said["total"] or parts["rest"] == 0
    assert len(found.changes) == 3 and str(found)
    return found


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=12).map("\n".join))
@example(
    "CUDA out of memory. "
    "GPU 0 has a total capacity of 16 GiB of which 1 MiB is free. 15 GiB reserved in total"
)
def test_any_text_is_accepted_or_refused_in_one_line(text):
    accepted(text)


@given(st.sampled_from([text for text, _ in READ]), st.integers(0, 500))
def test_a_message_that_was_cut_off_is_read_as_far_as_it_goes(text, end):
    start = text.index(" out of memory") + 14
    assert accepted(text[: start + end]) is not None


# The command


def answered(*arguments: str) -> int:
    parser = ArgumentParser()
    options(parser)
    return run(parser.parse_args(arguments))


def test_it_reads_a_log_words_and_what_is_pasted(tmp_path, monkeypatch, capsys):
    log = tmp_path / "my Läufe.log"
    log.write_bytes(b"\xff loss 3\n" + STATES.encode())
    monkeypatch.setenv("COLUMNS", "80")
    expected = diagnose(parse("loss 3\n" + STATES)).to_text(80) + "\n"
    assert answered(str(log)) == 0 and capsys.readouterr().out == expected
    assert answered("--", *OLD.split()) == 0 and "14.56 GiB" in capsys.readouterr().out
    assert answered(OLD) == 0 and "14.56 GiB" in capsys.readouterr().out
    assert answered("CUDA out of memory. Tried to allocate 2.00 GiB") == 0  # it ends as a file does
    assert "2.00 GiB more were" in capsys.readouterr().out
    other = tmp_path / "rank1.log"
    other.write_text("all is well\n")
    assert answered(str(other), str(log)) == 0
    assert expected in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"rank1\.log, .*rank1\.log: No out-of-memory"):
        answered(str(other), str(other).replace("rank1", "./rank1"))
    for missing in ("rank2.log", "rank2"):
        with pytest.raises(ValueError, match=f"There is no file '{missing}'"):
            answered(str(log), missing)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert answered() == 0
    printed = capsys.readouterr()
    assert printed.out == expected and printed.err == ""


# A real out-of-memory error


def test_what_the_simulated_gpu_raises_is_understood(monkeypatch):
    """The optimizer states of a model whose weights and gradients fit; the bytes are the allocator's own."""
    torch = pytest.importorskip("torch")
    from course_utils.watching import on_gpu as cards

    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    card = cards._new_card()
    monkeypatch.setattr(cards, "_card", lambda: card)
    weights = 9 * 64 * MiB
    with pytest.raises(torch.OutOfMemoryError) as raised, cards.on_gpu("1.5 GiB"):
        model = torch.nn.Sequential(
            *[torch.nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(9)]
        )
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    found = diagnose(parse("".join(traceback.format_exception(raised.value))))
    assert found.cause == "states" and "exp_avg" in found.because
    assert found.failure.sizes["total"] == 1536 * MiB and found.failure.sizes["requested"] == 64 * MiB
    assert 2 * weights < found.failure.sizes["allocated"] < 1536 * MiB
    assert found.failure.parts["free"] < 64 * MiB
    ours = ("on_gpu.py", "cuda_answers.py")
    assert not any(name in line for name in ours for line in found.failure.lines)
