"""Bad input by the thousand: all of it is accepted, or refused by an error that names the mistake.

What is accepted keeps the course's invariants. A sample is drawn here, the same each time; with COURSE_FULL=1
it is 50,000 inputs for the closed forms alone and 150 simulated runs, others each time.
"""

import copy
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from drawn_runs import random_run
from engine import simulate
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from course_utils import estimate, moments
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.evidence.accuracy import outcome
from course_utils.gpus import GPUS
from course_utils.interactive.explorer import CONTROLS, dashboard
from course_utils.interactive.explorer_page import changes, draw, link, linked
from course_utils.interactive.guesses import parse_guess
from course_utils.interactive.widgets import DTYPES, run_sliders, tensor_slider
from course_utils.lessons.parameters.widget import model_builder
from course_utils.measuring.recorded import key, read_folder, thinned, to_json
from course_utils.measuring.recording_file import append, repair
from course_utils.model_files import model_config
from course_utils.models import CHOICES, FAMILIES, LOGITS, PRESETS, TransformerConfig
from course_utils.run import ATTENTIONS, LORA_ALIASES, OPTIMIZERS, PRECISIONS, RECOMPUTES, TrainingRun
from course_utils.teaching.check_cells import cells_to_run
from course_utils.units import parse_bytes

FULL = os.environ.get("COURSE_FULL") == "1"

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = ROOT / "exercises" / "06_recomputation.ipynb"

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    7.5,
    4.0,
    math.nan,
    math.inf,
    10**7,
    10**30,
    10**400,
    "",
    "4",
    "fp32",
    "none",
    "\ud800",
    "x" * 300,
    b"x",
    (),
    ("q",),
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    set(),
    1j,
    ...,
    object,
    print,
)
ODD_JSON = tuple(value for value in ODD if isinstance(value, str | int | float | list | dict | None))


def many(sample: int, full: int) -> Any:
    """So many examples: the same each time, or with COURSE_FULL others."""
    return settings(
        max_examples=full if FULL else sample,
        derandomize=not FULL,
        deadline=None,
        database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
    )


def names(message: str, *words: Any) -> bool:
    """Whether a message has one of these in it: a choice's name, or its value as a reader would write it."""
    return any(word and word in message for word in words)


def spelled(value: Any) -> tuple[str, ...]:
    """A value as a message may write it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}", str(value)
    if isinstance(value, tuple | list) and value:
        return repr(value), repr(value[0])
    return (value if isinstance(value, str) else repr(value), repr(value))


# Training runs

POWERS = st.integers(0, 6).map(lambda power: 2**power)
FLAGS = st.booleans()


@st.composite
def small_models(draw: Any) -> TransformerConfig:
    """A transformer of any family and sizes that need not be round."""
    family = draw(st.sampled_from(list(FAMILIES)))
    heads = draw(st.integers(1, 6))
    groups = [kv for kv in range(1, heads + 1) if heads % kv == 0]
    sizes: dict[str, Any] = {
        "layers": draw(st.integers(1, 5)),
        "hidden": heads * draw(st.sampled_from([4, 8, 24, 64, 128, 256])),
        "heads": heads,
        "vocab": draw(st.integers(2, 9000)),
        "max_positions": draw(st.sampled_from([64, 500, 4096])),
        "kv_heads": draw(st.sampled_from(groups)),
        "ffn": draw(st.integers(1, 1500)),
        "tied": draw(FLAGS),
        "bias": draw(FLAGS),
        "qkv_bias": draw(FLAGS),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    sizes |= {name: draw(st.sampled_from(known)) for name, known in CHOICES.items() if draw(FLAGS)}
    if draw(st.integers(0, 4)) == 0:
        experts = draw(st.integers(2, 8))
        sizes |= {"experts": experts, "experts_per_token": draw(st.integers(1, min(3, experts)))}
    return TransformerConfig("small", family, **sizes)


CHOSEN: dict[str, st.SearchStrategy[Any]] = {
    "micro_batch": st.one_of(st.integers(1, 40), st.just(4096)),
    "seq_len": st.sampled_from([1, 17, 64, 128, 500, 512, 1000, 1024]),
    "precision": st.sampled_from([*PRECISIONS, "amp-bf16", "bf16-master"]),
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "attention": st.sampled_from(ATTENTIONS),
    "recompute": st.sampled_from([*RECOMPUTES, "none", "every-1", "every-2", "every-5"]),
    "accumulation_steps": st.integers(1, 5),
    "global_batch": st.integers(1, 8).map(lambda times: times * 840),
    "world_size": st.one_of(POWERS, st.sampled_from([3, 1000, 1_000_000])),
    "zero_stage": st.integers(0, 3),
    "bucket_view": FLAGS,
    "clip_grad_norm": st.floats(0.001, 1e6),
    "set_to_none": FLAGS,
    "loss_chunks": st.integers(1, 9),
    "lora_rank": st.integers(0, 9),
    "lora_targets": st.sampled_from(
        [(), "attention", "mlp", ("q", "v"), ("out", "mlp"), *LORA_ALIASES["mlp"]]
    ),
    "frozen_bits": st.sampled_from([None, 4, 8, 16]),
    "card": st.sampled_from(list(GPUS)),
    "dropout": st.floats(0, 0.99),
    "logits": st.sampled_from(LOGITS),
    "tensor_parallel": POWERS,
    "sequence_parallel": FLAGS,
}
RARE = {"global_batch", "tensor_parallel", "sequence_parallel", "lora_targets"}
"""What contradicts most of the others."""

MODELS = st.one_of(st.sampled_from(list(PRESETS)), small_models())


@st.composite
def choices(draw: Any) -> dict[str, Any]:
    """A model, and some of a run's choices as they may be; that they go together is not said."""
    wanted = draw(st.sets(st.sampled_from(list(CHOSEN)), max_size=9))
    if draw(st.integers(0, 3)):
        wanted -= RARE
    return {"model": draw(MODELS)} | {name: draw(CHOSEN[name]) for name in CHOSEN if name in wanted}


def made(chosen: Mapping[str, Any]) -> TrainingRun | str:
    """The run, or the words with which it is refused."""
    try:
        return TrainingRun(**chosen)
    except (ValueError, TypeError) as refused:
        return str(refused)


@many(150, 14_000)
@given(chosen=choices())
def test_a_run_is_refused_by_name_or_keeps_every_invariant(chosen: dict[str, Any]) -> None:
    run = made(chosen)
    if isinstance(run, str):
        said = {"attention": "flash", "precision": "amp-bf16", "optimizer": "adamw"} | chosen
        values = [word for value in said.values() if len(str(value)) > 2 for word in spelled(value)]
        assert names(run, *chosen, *values, "small", "LoRA"), run
        return
    known = {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}
    assert eval(run.code(), known) == run
    assert str(run)
    try:
        peak = estimate(run)
    except ValueError as refused:
        assert names(str(refused), *chosen, *spelled(run.precision.name), "FSDP2", "tensor parallel"), refused
        return
    keeps_invariants(run, peak)


def keeps_invariants(run: TrainingRun, peak: MemoryBreakdown) -> None:
    """What holds of every estimate."""
    stages = moments(run)
    for name, stage in stages.items():
        assert stage.total == sum(stage.values()), f"{name}: {stage}"
        assert all(size >= 0 for size in stage.values()), f"{name}: {stage}"
    assert peak.total == max(stage.total for stage in stages.values()) and set(peak) == set(KINDS)
    # Two choices cut at sizes of their own, so that a larger batch can need less, as the simulation says too:
    # offloaded is what has a certain size, and 6 tokens in 5 chunks of one size are 3 of 2, fewer than of 5
    # tokens.
    if run.recompute != "offload" and run.micro_batch < 1_000_000:
        larger = run.replace(micro_batch=run.micro_batch + 1)
        needs_more = pieces(larger) < pieces(run) or estimate(larger).total >= peak.total
        assert needs_more, f"{larger} needs less than {run}"
    # "selective" keeps what every matrix product gives, of which a frozen one under LoRA needs nothing
    # otherwise.
    keeps_products = run.recompute == "selective" and run.lora_rank
    if run.recompute not in ("none", "offload") and not keeps_products:
        whole = moments(run.replace(recompute="none"))["end of forward"]["activations"]
        kept = stages["end of forward"]["activations"]
        assert kept <= whole, f"{run} keeps more when recomputed"


def pieces(run: TrainingRun) -> int:
    """How many pieces the loss is really cut into."""
    tokens = run.micro_batch * run.seq_len
    return math.ceil(tokens / math.ceil(tokens / run.loss_chunks))


@many(120, 10_000)
@given(chosen=choices(), name=st.sampled_from([*CHOSEN, "model"]), value=st.sampled_from(ODD))
def test_an_odd_value_is_refused_by_its_name(chosen: dict[str, Any], name: str, value: Any) -> None:
    assume(isinstance(made(chosen), TrainingRun))
    run = made(chosen | {name: value})
    if isinstance(run, str):
        others = [other for other in chosen if other != name]
        contradiction = value in (0, 1, 3, 4.0, "fp32", "none", 10**7) and names(run, *others)
        is_named = names(run, name, name.replace("_", " ").split()[0], *spelled(value))
        assert is_named or contradiction, (name, value, run)
        assert "unhashable" not in run, run
    else:
        assert str(run) and run.code()


@many(60, 6_000)
@given(data=st.data(), sizes=small_models())
def test_an_odd_size_of_a_model_is_refused_by_its_name(data: st.DataObject, sizes: TransformerConfig) -> None:
    name = data.draw(st.sampled_from(list(vars(sizes))))
    value = data.draw(st.sampled_from(ODD))
    try:
        model = TransformerConfig(**(vars(sizes) | {name: value}))
    except ValueError as refused:
        assert names(str(refused), name, name.removesuffix("_heads"), *spelled(value)), (name, value, refused)
        return
    if math.prod(vars(model).get(size, 1) for size in ("layers", "vocab")) < 10**8:
        assert model.parameters > 0


@pytest.mark.parametrize("seed", range(7_000_000, 7_000_000 + (150 if FULL else 6)))
def test_an_estimate_is_what_a_simulation_finds(seed: int) -> None:
    run = random_run(random.randrange(10**9) if FULL else seed)
    found = outcome(seed, run)
    assert not found.failed, found.failed
    if found.compared:  # FSDP2, offloading and clipping are promised within 2 %, with exact activations
        assert found.right, (run.code(), found.kinds)
        assert found.loose or not any(found.kinds.values()), (run.code(), found.kinds)


# Files


def broken(draw: Any, content: Any, most: int = 2) -> tuple[Any, set[str]]:
    """A copy of JSON content in which values are odd or missing; and the keys where it was changed."""
    content = copy.deepcopy(content)
    touched: set[str] = set()
    for _ in range(draw(st.integers(1, most))):
        place = content
        last = ""
        for _ in range(draw(st.integers(0, 4))):
            inner = [key for key, value in _items(place) if isinstance(value, dict | list) and value]
            if not inner:
                break
            last = draw(st.sampled_from(inner))
            place = place[last]
        where = draw(st.sampled_from([key for key, _ in _items(place)])) if place else None
        if where is None:
            continue
        touched.add(str(where if isinstance(where, str) else last))
        if draw(st.integers(0, 3)) == 0:
            del place[where]
        else:
            # or the next change would be of the list
            place[where] = copy.deepcopy(draw(st.sampled_from(ODD_JSON)))
            touched.update(spelled(place[where]))
    return content, touched


def _items(place: Any) -> list[tuple[Any, Any]]:
    return list(place.items()) if isinstance(place, dict) else list(enumerate(place))


def bytes_of(draw: Any, text: str) -> bytes:
    """The text as it may arrive: whole, cut off, or with other bytes in it."""
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    how = draw(st.sampled_from(["whole"] * 6 + ["cut", "flipped"]))
    if how == "cut":
        return bytes(raw[: draw(st.integers(0, len(raw)))])
    if how == "flipped" and raw:
        for _ in range(draw(st.integers(1, 3))):
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


_LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "sliding_window": 4096,
}
CONFIGS: list[dict[str, Any]] = [
    {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 128,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": 1e4},
    }
    | _LLAMA,
    {"model_type": "mistral", **_LLAMA},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **_LLAMA},
    {"model_type": "qwen2", "use_sliding_window": False, **_LLAMA},
]


@many(100, 8_000)
@given(data=st.data())
def test_a_config_file_is_read_or_refused_by_name(data: st.DataObject, tmp_path_factory: Any) -> None:
    content, touched = broken(data.draw, data.draw(st.sampled_from(CONFIGS)), most=1)
    raw = bytes_of(data.draw, json.dumps(content))
    file = tmp_path_factory.getbasetemp() / "some-model.json"
    file.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = model_config(file)
        except ValueError as refused:
            assert str(refused).startswith(f"cannot read a model from {file}: ")
            if raw == json.dumps(content).encode():
                related = {
                    word for key in touched for word in (key, key.removeprefix("num_"), *key.split("_"))
                }
                assert names(str(refused), *related, "hidden", "heads", "JSON"), (touched, str(refused))
            return
    run = TrainingRun(model, seq_len=1, attention="eager", precision="fp32")
    assert estimate(run).total >= 4 * model.parameters


@cache
def recording() -> dict[str, Any]:
    """A run's recording, with every kind of part."""
    run = TrainingRun("tiny-gpt", 2, 64, "fp32", attention="eager")
    measured = to_json(thinned(simulate(run), points=12))
    measured["allocations"] = measured["allocations"][:4]
    return {
        "task": key(run, 2),
        "kind": "run",
        "status": "measured",
        "torch": "2.13.0",
        "date": "2026-11-21",
        "commit": "abc",
        "steps": 2,
        "detail": "",
        "device": {"name": "NVIDIA H200", "capability": [9, 0], "memory": 1, "driver": "580"},
        "parts": {
            "counters": {"allocated": 5000, "reserved": 6000, "driver": 7000, "phases": {}},
            "measured": measured | {"losses": [8.5, 8.25]},
        },
    }


@many(100, 5_000)
@given(data=st.data())
def test_a_recording_is_read_or_refused_by_its_line(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "recordings"
    folder.mkdir(exist_ok=True)
    file = folder / "gpu.jsonl"
    file.unlink(missing_ok=True)
    append(file, recording())
    content, _ = broken(data.draw, {"schema": 1, **recording()})
    with file.open("ab") as lines:
        lines.write(bytes_of(data.draw, json.dumps(content)) + data.draw(st.sampled_from([b"", b"\n"])))
    try:
        found = read_folder(folder)
    except ValueError as refused:
        assert names(str(refused), "gpu.jsonl, line 2"), refused
    else:
        assert found[0].measurement().peak == recording_peak()
    before = file.read_bytes().partition(b"\n")[0]
    repair(file)
    assert file.read_bytes().endswith(b"\n")
    assert file.read_bytes().partition(b"\n")[0] == before


def recording_peak() -> int:
    return sum(recording()["parts"]["measured"]["breakdown"][0].values())


@many(60, 2_500)
@given(data=st.data())
def test_a_notebook_that_is_handed_in_has_cells_to_run_or_a_remark(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    handed_in = tmp_path_factory.getbasetemp() / "work.ipynb"
    content, _ = broken(data.draw, exercises(), most=4)
    handed_in.write_bytes(bytes_of(data.draw, json.dumps(content)))
    try:
        cells, _ = cells_to_run(handed_in)
    except ValueError as problem:
        assert str(problem).startswith(("is ", "has "))
    else:
        assert all(isinstance(cell["source"], str) for cell in cells) and json.dumps(cells).encode()
        assert {cell["exercise"][:2] for cell in cells if "exercise" in cell} == {"06"}


@cache
def exercises() -> Any:
    return json.loads(EXERCISES.read_text(encoding="utf-8"))


# Controls


OFFERED = {control.name: control.values for control in CONTROLS}


@many(60, 2_000)
@given(data=st.data())
def test_controls_show_a_run_or_say_why_not(data: st.DataObject) -> None:
    chosen = {
        name: data.draw(st.sampled_from(values)) for name, values in OFFERED.items() if data.draw(FLAGS)
    }
    if data.draw(FLAGS):
        name = data.draw(st.sampled_from([*OFFERED, "batch", "", "\ud800"]))
        chosen[name] = data.draw(st.sampled_from(ODD))
    try:
        drawn = dashboard(chosen)
    except ValueError as refused:
        assert len(str(refused)) > 20, refused
        return
    assert drawn.breakdown.total == sum(drawn.breakdown.values()) and drawn.verdict and drawn.stack.svg
    assert drawn.run == TrainingRun(**chosen_of(drawn.run))


def chosen_of(run: TrainingRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in vars(run)}


ODD_TEXTS = [*map(str, ODD[:8]), *OFFERED, "%ff", "a=b&c", "0" * 5000]
TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(ODD_TEXTS))


@many(40, 1_000)
@given(
    fragment=st.dictionaries(st.one_of(st.sampled_from(list(OFFERED)), TEXTS), TEXTS, max_size=4), raw=TEXTS
)
def test_a_link_to_the_explorer_is_followed_as_far_as_it_can_be(fragment: dict[str, str], raw: str) -> None:
    for text in (raw, "#" + "&".join(f"{name}={value}" for name, value in fragment.items())):
        found = json.loads(linked(text))
        assert all(len(words) > 20 for words in found["refused"])
        assert set(found["chosen"]) == set(OFFERED) and link(json.dumps(found["chosen"])) is not None
    asked = json.dumps({**json.loads(linked(""))["chosen"], **fragment})
    shown = json.loads(draw(asked))
    assert ("refused" in shown) == (changes(asked) == "[]" and "refused" in shown)
    assert "refused" in shown or shown["total"] > 0


STARTERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sliders": (run_sliders, {"model": "gpt2", "gpu": "T4-16GB", "micro_batch": 4, "precision": "amp-fp16"}),
    "tensor slider": (
        tensor_slider,
        {"batch": 8, "sequence": 128, "hidden": 256, "dtype": next(iter(DTYPES))},
    ),
    "model builder": (model_builder, {"start": "gpt2"}),
}


@many(40, 1_000)
@given(data=st.data())
def test_a_widget_begins_or_says_why_not(data: st.DataObject) -> None:
    start, first = STARTERS[data.draw(st.sampled_from(list(STARTERS)))]
    name = data.draw(st.sampled_from(list(first)))
    value = data.draw(st.sampled_from(ODD))
    try:
        widget = start(**(first | {name: value}))
    except (ValueError, TypeError) as refused:
        known = ("number format", "GPU", "a model is") if name in ("dtype", "gpu", "model", "start") else ()
        assert names(str(refused), name, *spelled(value), *known), (name, value, refused)
        assert "unhashable" not in str(refused), refused
        return
    assert widget.figure is not None or "Not possible" in widget.message


@many(60, 1_000)
@given(
    text=st.one_of(TEXTS, st.from_regex(r"[0-9]{1,400}[.,_]?[0-9]{0,4} ?(GB|GiB|kB|TB|B)?", fullmatch=True))
)
def test_an_amount_is_read_or_refused_in_its_own_words(text: str) -> None:
    for read in (parse_bytes, lambda text: parse_guess(text, "GB")):
        try:
            amount = read(text)
        except ValueError as refused:
            assert names(str(refused), repr(text), text.strip(), "Write"), refused
        else:
            assert math.isfinite(amount) and amount >= 0
