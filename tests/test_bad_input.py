"""Bad input by the hundred: all of it is accepted, or refused by an error that names the mistake.

What is accepted keeps the course's invariants.
"""

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from bad_input import ODD, broken, bytes_of, many, names, spelled
from hypothesis import assume, given
from hypothesis import strategies as st

from course_utils import estimate, moments
from course_utils.breakdown import KINDS, MemoryBreakdown
from course_utils.gpus import GPUS
from course_utils.interactive.guesses import parse_guess
from course_utils.model_files import model_config
from course_utils.models import CHOICES, FAMILIES, LOGITS, PRESETS, TransformerConfig
from course_utils.run import (
    ATTENTIONS,
    COMPILES,
    LORA_ALIASES,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    TrainingRun,
)
from course_utils.units import parse_bytes

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
    "compile": st.sampled_from(COMPILES),
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


@many(100, 14_000)
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


@many(80, 10_000)
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


@many(40, 6_000)
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


# A model's file, and amounts


CONFIGS: list[dict[str, Any]] = [
    {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 128,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    {
        "model_type": "mixtral",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "intermediate_size": 96,
        "rope_parameters": {"rope_theta": 1e4},
        "head_dim": 16,
        "sliding_window": 4096,
    },
]


@many(60, 8_000)
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


@many(40, 1_000)
@given(
    text=st.one_of(
        st.text(max_size=12),
        st.from_regex(r"[0-9]{1,400}[.,_]?[0-9]{0,4} ?(GB|GiB|kB|TB|B)?", fullmatch=True),
    )
)
def test_an_amount_is_read_or_refused_in_its_own_words(text: str) -> None:
    for read in (parse_bytes, lambda text: parse_guess(text, "GB")):
        try:
            amount = read(text)
        except ValueError as refused:
            assert names(str(refused), repr(text), text.strip(), "Write"), refused
        else:
            assert math.isfinite(amount) and amount >= 0
