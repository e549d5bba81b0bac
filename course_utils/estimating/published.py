"""The field's published formulas, each as its source has it.

Lessons and the evidence compare them with the course's own; they are never tuned to it.

A formula that takes a run returns bytes, or a mapping of parts to bytes, and raises ValueError for runs of
which its source says nothing. What a source leaves out is said in the docstring; `FORMULAS` lists what the
evidence compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt

from ..models import block_shapes, outer_shapes
from ..run import TrainingRun
from ..units import round_up

Parts = dict[str, int]


def _refuse(formula: str, *reasons: tuple[object, str]) -> None:
    """Raise ValueError for the first reason that holds: a condition and the choice that it describes."""
    for holds, choice in reasons:
        if holds:
            raise ValueError(f"{formula} does not cover {choice}")


def _refuse_what_none_covers(formula: str, run: TrainingRun) -> None:
    """Refuse what no formula here covers.

    That is LoRA, a chunked loss, offloading, fp8, optimizers without Adam's moments.
    """
    recomputes = run.recompute in ("sqrt", "selective") or run.recompute.startswith("every")
    _refuse(
        formula,
        (run.lora_rank, "LoRA"),
        (run.loss_chunks > 1, "a loss in chunks"),
        (run.compile != "none", "torch.compile"),
        (run.recompute == "offload", "activations that are offloaded"),
        (recomputes, f"{run.recompute} recomputation"),
        (run.precision.name in ("fp8", "bf16"), f"the {run.precision.name} recipe"),
        (run.optimizer.algorithm not in ("adam", "adamw"), f"the {run.optimizer.algorithm} optimizer"),
        (run.model.experts, "a mixture of experts"),
    )


def _refuse_fp32(formula: str, run: TrainingRun) -> None:
    _refuse(formula, (run.precision.compute != 2, f"{run.precision.name}: it counts 16-bit activations"))


def _states(N: int, D: int, stage: int, weight: int, gradient: int, optimizer: int) -> Parts:
    """Bytes of states at these bytes per parameter.

    Stage 1 shards the optimizer's, 2 the gradients, 3 the weights.
    """
    return {
        "parameters": weight * N // (D if stage == 3 else 1),
        "gradients": gradient * N // (D if stage >= 2 else 1),
        "optimizer_states": optimizer * N // (D if stage >= 1 else 1),
    }


# ZeRO: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"


def zero_state_bytes(parameters: int, optimizer_bytes: int = 12) -> dict[str, int]:
    """Bytes of fp16 weights, fp16 gradients and optimizer states: 2Ψ + 2Ψ + KΨ.

    K = 12 for mixed-precision Adam.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: fp32 weights, momentum and variance are 4Ψ each.
    """
    third = optimizer_bytes // 3
    return {
        "fp16 parameters": 2 * parameters,
        "fp16 gradients": 2 * parameters,
        "fp32 parameters": third * parameters,
        "fp32 momentum": third * parameters,
        "fp32 variance": third * parameters,
    }


def zero_sharded_state_bytes(parameters: int, stage: int, ranks: int, optimizer_bytes: int = 12) -> Parts:
    """Bytes of one rank's states: 4Ψ + KΨ/D, 2Ψ + (2 + K)Ψ/D and (4 + K)Ψ/D for stages 1, 2 and 3 of D ranks.

    ZeRO, section 5 and table 1, which has 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 ranks. It
    leaves out what is gathered for a moment, buckets, and the padding of shards.
    """
    return _states(parameters, ranks, stage, 2, 2, optimizer_bytes)


def zero_run_state_bytes(run: TrainingRun) -> Parts:
    """The same for a run in 16-bit.

    Autocast keeps fp32 weights and gradients: 16 bytes too, but in other parts.
    """
    _refuse_what_none_covers("ZeRO", run)
    _refuse_fp32("ZeRO", run)
    _refuse("ZeRO", (run.tensor_parallel > 1, "tensor parallelism in these formulas"))
    return zero_sharded_state_bytes(run.model.parameters, run.zero_stage, run.world_size)


def zero_activation_bytes(run: TrainingRun) -> int:
    """Bytes in 16-bit of a GPT-2-like model's 12 · h · b · s · L activations (ZeRO,
    section 3.2, footnote 3).
    """
    return 2 * 12 * run.model.hidden * run.micro_batch * run.seq_len * run.model.layers


def zero_checkpointed_bytes(run: TrainingRun) -> int:
    """Bytes left with checkpointing: the total over √L, "the square root of the total".

    ZeRO, section 3.2.
    """
    return round(zero_activation_bytes(run) / sqrt(run.model.layers))


def zero_bytes(run: TrainingRun) -> Parts:
    """Bytes of states and activations as ZeRO's section 3 adds them up for GPT-2 XL.

    With recomputation, activations are their total over √L.

    It leaves out the logits and the loss, the kernel that attention runs on, and all of section 3.2's
    buffers.
    """
    _refuse("ZeRO", (run.recompute == "selective-attention", "selective recomputation"))
    states = zero_run_state_bytes(run)
    kept = zero_activation_bytes(run) if run.recompute == "none" else zero_checkpointed_bytes(run)
    return states | {"activations": kept}


# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"


def korthikanti_block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps in 16-bit with eager attention: s·b·h·(34 + 5·a·s/h).

    Korthikanti et al. 2022, section 4.1 and the first row of table 2.
    """
    s, b, h, a = run.seq_len, run.micro_batch, run.model.hidden, run.model.heads
    return s * b * (34 * h + 5 * a * s)


def korthikanti_activation_bytes(run: TrainingRun) -> int:
    """The same for L blocks: table 2's first row times L."""
    return run.model.layers * korthikanti_block_bytes(run)


def checkpoints_bytes(run: TrainingRun, element: int = 2) -> int:
    """Bytes of one checkpoint per block: 2·s·b·h·L in 16-bit (Korthikanti et al. 2022, section 5)."""
    return element * run.seq_len * run.micro_batch * run.model.hidden * run.model.layers


def korthikanti_parallel_block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps on one of t tensor-parallel ranks (Korthikanti et al. 2022, table 2).

    Sections 4.1 and 4.2 derive it. Of 34·s·b·h, tensor parallelism splits 24 and leaves 10 whole, as the
    norms, their dropout and the inputs of both halves are on every rank; sequence parallelism splits those
    too. Selective recomputation drops the term in s² (section 5), full recomputation keeps the block's input,
    which nobody splits. What t does not divide is rounded up. Every model counts as a GPT, with a GELU MLP of
    4h, dropout and no grouped queries, and every kernel as eager: so others use this formula, and
    `megatron.block_activation_bytes`, which answers for a run, refuses those. Raises ValueError for what no
    formula here covers, and for fp32.
    """
    _refuse_what_none_covers("Korthikanti et al.", run)
    _refuse_fp32("Korthikanti et al.", run)
    s, b, h, a, t = run.seq_len, run.micro_batch, run.model.hidden, run.model.heads, run.tensor_parallel
    if run.recompute == "full":
        return 2 * s * b * h
    scores = 5 * a * s * s * b if run.recompute == "none" else 0
    whole = 0 if run.sequence_parallel else 10 * s * b * h
    split = 34 * s * b * h - whole + scores
    return whole + -(-split // t)


def korthikanti_outer_bytes(run: TrainingRun) -> int:
    """Bytes kept outside the blocks: (s·b·h + 4·s·b·h·(1 + V/h)) / t (Korthikanti et al. 2022, section 4.3).

    One byte for the dropout of the embeddings, two each for the inputs of the last norm and of the head, four
    for the logits in fp32.
    """
    s, b, h, V, t = run.seq_len, run.micro_batch, run.model.hidden, run.model.vocab, run.tensor_parallel
    return (s * b * h + 4 * s * b * h + 4 * s * b * V) // t


def korthikanti_parts(run: TrainingRun) -> Parts:
    """Bytes of the activations with the loss; Korthikanti et al. count no states."""
    blocks = run.model.layers * korthikanti_parallel_block_bytes(run)
    return {"blocks": blocks, "embedding and loss": korthikanti_outer_bytes(run)}


def korthikanti_model_flops(run: TrainingRun) -> int:
    """FLOPs of one micro-batch, forward and backward: 72·b·L·s·h²·(1 + s/6h + V/12hL).

    Korthikanti et al. 2022, eq. 7.

    Matrix products alone, of an MLP of 4h without a gate, and attention as if it were not causal.
    """
    s, b, h, L, V = run.seq_len, run.micro_batch, run.model.hidden, run.model.layers, run.model.vocab
    return 72 * b * L * s * h * h + 12 * b * L * s * s * h + 6 * b * s * h * V


def korthikanti_hardware_flops(run: TrainingRun) -> int:
    """The same with selective recomputation: s/3h in place of s/6h (Korthikanti et al. 2022, eq. 8).

    This adds three forward passes of the attention core where one is run again: see
    `step_time.recomputed_flops`.
    """
    s, b, h, L = run.seq_len, run.micro_batch, run.model.hidden, run.model.layers
    return korthikanti_model_flops(run) + 12 * b * L * s * s * h


# Megatron-LM, megatron/training/theoretical_memory_usage.py


def megatron_parameter_count(run: TrainingRun) -> int:
    """Parameters of one rank as Megatron-LM counts them: no biases, no learned positions, V padded to 128·t.

    Megatron-LM, theoretical_memory_usage.py, compute_weight_and_optimizer_memory.
    """
    model, t = run.model, run.tensor_parallel
    h, ffn = model.hidden, model.ffn
    norm = h if model.norm == "rmsnorm" else 2 * h
    attention = 2 * h * (h + model.kv)
    mlp = (3 if model.mlp == "swiglu" else 2) * h * ffn
    embeddings = round_up(model.vocab, 128 * t) * h * (1 if model.tied else 2)
    return (model.layers * (attention + mlp + 2 * norm) + norm + embeddings) // t


def megatron_parts(run: TrainingRun) -> Parts:
    """Bytes that Megatron-LM reports before training.

    18 a parameter, 6 + 12/D with its distributed optimizer.

    Megatron-LM, theoretical_memory_usage.py: bf16 weights, fp32 gradients, fp32 weights and Adam's moments.
    Of the activations there are two formulas. With sequence parallelism and selective recomputation:
    s·b·h·(18 + 4·ffn/h) a block, with the embedding and the loss all divided by t. Otherwise s·b·h·(10 +
    24/t) a block, the logits in 16-bit, and 5 % on top. Neither has the term in s²; full recomputation and
    the gradients' dtype change nothing.
    """
    _refuse_what_none_covers("Megatron-LM's report", run)
    _refuse_fp32("Megatron-LM's report", run)
    _refuse(
        "Megatron-LM's report",
        (run.zero_stage > 1, f"ZeRO-{run.zero_stage}"),
        (run.recompute == "full", "full"),
    )
    sharded = run.zero_stage == 1
    N = megatron_parameter_count(run)
    D = run.world_size
    states = 6 * N + 12 * N // D if sharded else 18 * N
    return {"weights and optimizer": states, "activations": _megatron_activation_bytes(run)}


def _megatron_activation_bytes(run: TrainingRun) -> int:
    model, t = run.model, run.tensor_parallel
    s, b, h, L = run.seq_len, run.micro_batch, model.hidden, model.layers
    V = round_up(model.vocab, 128 * t)
    embedding = 8 * s * b + s * b * h
    if run.sequence_parallel and run.recompute == "selective-attention":
        return (s * b * (18 * h + 4 * model.ffn) * L + embedding + 4 * s * b * (h + V)) // t
    blocks = (10 * s * b * h + 24 * s * b * h // t) * L
    return (blocks + embedding + 2 * (s * b * V // t + s * b * h)) * 105 // 100


# EleutherAI's cookbook, calc/calc_transformer_mem.py


def cookbook_parameter_count(run: TrainingRun) -> int:
    """Parameters as EleutherAI's cookbook counts them.

    Two embeddings, tied or not, s positions, no biases but norms'.

    EleutherAI cookbook, calc_transformer_mem.py, calc_mem. Three matrices in a SwiGLU MLP have to be asked
    for.
    """
    model = run.model
    h, L, ffn = model.hidden, model.layers, model.ffn
    matrices = 3 if model.mlp == "swiglu" else 2
    return (
        2 * model.vocab * h
        + h * run.seq_len
        + 8 * h * L
        + 2 * h
        + 2 * L * h * (h + model.kv)
        + matrices * L * h * ffn
    )


def cookbook_parts(run: TrainingRun) -> Parts:
    """Bytes on one GPU as EleutherAI's cookbook has them.

    Weights in 16-bit, fp32 gradients, 12 bytes of optimizer.

    EleutherAI cookbook, calc_transformer_mem.py, calc_mem, at its default settings. Without checkpointing
    activations are s·b·h·L·(34 + 5·a·s/h), eager whatever the kernel, 16-bit even in fp32; with checkpointing
    34·s·b·h·L, which is Korthikanti's selective row. Logits and loss are not in it. ZeRO adds 5·10⁸ elements
    for its buckets, stage 3 another 10⁹ for what is gathered.
    """
    formula = "EleutherAI's cookbook"
    _refuse_what_none_covers(formula, run)
    parallel = "tensor parallelism without pipeline stages, as the course has it"
    _refuse(formula, (run.tensor_parallel > 1, parallel))
    stage, element = run.zero_stage, run.precision.compute
    s, b, h, L, a = run.seq_len, run.micro_batch, run.model.hidden, run.model.layers, run.model.heads
    scores = 5 * a * s * s * b * L if run.recompute == "none" else 0
    buffered = 0
    if stage >= 1:
        buffered += 500_000_000
    if stage == 3:
        buffered += 1_000_000_000
    states = _states(cookbook_parameter_count(run), run.world_size, stage, element, 4, 12)
    return states | {"communication": element * buffered, "activations": 34 * s * b * h * L + scores}


# llm-analysis, llm_analysis/analysis.py


def llm_analysis_parts(run: TrainingRun) -> Parts:
    """Bytes on one GPU as llm-analysis adds them.

    Weights in 16-bit, fp32 gradients, 12 bytes of optimizer a parameter.

    llm-analysis, analysis.py, LLMAnalysis.get_activation_memory_per_layer and training, at its default
    settings (flash attention has a formula of its own; dropout after attention alone; the inputs of both
    norms in fp32). A gated MLP counts as two matrices. Of the loss it has the logits in 16-bit. N is here the
    exact count.
    """
    formula = "llm-analysis"
    _refuse_what_none_covers(formula, run)
    _refuse_fp32(formula, run)
    _refuse(formula, (run.tensor_parallel > 1, "tensor parallelism as the course has it"))
    sb = run.seq_len * run.micro_batch
    h = run.model.hidden
    L = run.model.layers
    V = run.model.vocab
    activations = L * _llm_analysis_block_bytes(run) + 2 * sb * V + 4 * sb * h
    states = _states(run.model.parameters, run.world_size, run.zero_stage, 2, 4, 12)
    return states | {"activations": activations}


def _llm_analysis_block_bytes(run: TrainingRun) -> int:
    sb = run.seq_len * run.micro_batch
    h = run.model.hidden
    a = run.model.heads
    ffn = run.model.ffn
    if run.recompute == "full":
        return 2 * sb * h
    if run.recompute == "selective-attention":
        core = 0
    elif run.attention == "eager":
        core = 4 * a * run.seq_len * sb
    else:
        core = 2 * (2 * sb * h + 4 * a * sb)
    attention = 10 * sb * h + sb * h + core
    mlp = 2 * sb * h + 4 * sb * ffn
    return attention + mlp + 2 * 4 * sb * h


# The Ultra-Scale Playbook: Tazi et al. 2025, "The Ultra-Scale Playbook: Training LLMs on GPU Clusters"


def playbook_parts(run: TrainingRun) -> Parts:
    """Bytes by the Ultra-Scale Playbook's text, with 16 bytes per parameter of states.

    N = hV + L(12h² + 13h) + 2h.

    Its sections on weights, gradients and optimizer states (20 bytes with fp32 gradients) and on activations:
    Korthikanti's 34 + 5·a·s/h for every model and kernel; recomputation is Korthikanti's too. No logits, no
    loss.
    """
    formula = "the Ultra-Scale Playbook"
    _refuse_what_none_covers(formula, run)
    _refuse(formula, (run.world_size > 1 or run.tensor_parallel > 1, "several ranks in these formulas"))
    model, precision = run.model, run.precision
    s, b, h, L = run.seq_len, run.micro_batch, model.hidden, model.layers
    N = h * model.vocab + L * (12 * h * h + 13 * h) + 2 * h
    mixed = precision.compute == 2
    _refuse(formula, (not mixed, "fp32 activations"))
    gradients = 2 * N
    if precision.name == "bf16-master-fp32grad":
        gradients += 4 * N
    if run.recompute == "none":
        block = korthikanti_block_bytes(run)
    elif run.recompute == "full":
        block = 2 * s * b * h
    else:
        block = 34 * s * b * h
    return {
        "parameters": 2 * N,
        "gradients": gradients,
        "optimizer_states": 4 * N + 8 * N,
        "activations": L * block,
    }


def playbook_figure_parts(run: TrainingRun) -> Parts:
    """Bytes by the Ultra-Scale Playbook's interactive memory figure, which has more.

    It is in the Space's src/memory.js.

    GELU and SwiGLU apart, t and sequence parallelism, the embedding's dropout, the last norm, the head and
    the logits in fp32. SwiGLU counts as four ffn-wide tensors; N is still GPT-2's 12h² + 13h a block, with s
    positions.
    """
    formula = "the Ultra-Scale Playbook's figure"
    _refuse_what_none_covers(formula, run)
    h, L, c = run.model.hidden, run.model.layers, run.precision.compute
    N = h * (run.model.vocab + run.seq_len) + L * (12 * h * h + 13 * h) + 2 * h
    states = _states(N, run.world_size, run.zero_stage, c, c, 12 if c == 2 else 8)
    return states | {"activations": _playbook_figure_activation_bytes(run)}


def _playbook_figure_activation_bytes(run: TrainingRun) -> int:
    model, c, t = run.model, run.precision.compute, run.tensor_parallel
    s = run.seq_len
    sb = run.seq_len * run.micro_batch
    h = model.hidden
    a = model.heads
    ffn = model.ffn
    split = t if run.sequence_parallel else 1
    outer = sb * h // split + 2 * c * sb * h // split + 4 * sb * model.vocab // split
    if run.recompute == "full":
        return c * sb * h * model.layers + outer
    scores = 0
    if run.recompute == "none":
        # With sequence parallelism the source forgets to divide the scores by t; so does this.
        scores = (2 * c + 1) * a * s * sb // (1 if run.sequence_parallel else t)
    attention = 4 * c * sb * h // t + (c + 1) * sb * h // split + scores
    wide = 4 if model.mlp == "swiglu" else 2
    mlp = c * sb * h // split + wide * c * sb * ffn // t + sb * h // split
    return model.layers * (attention + mlp + 2 * c * sb * h // split) + outer


# DeepSpeed, docs: "Memory Requirements"


def deepspeed_zero2_bytes(parameters: int, ranks: int) -> int:
    """Bytes of model states under ZeRO-2 without offloading: 4N + 16N/D.

    DeepSpeed's documentation, "Memory Requirements": the gradients are upcast all at once for the update. Of
    activations, buckets and logits it says that they come on top. The function behind the page's examples,
    estimate_zero2_model_states_mem_needs, has become 2N + 18N/D since (commit 02aa38c), the same on one rank.
    """
    return 4 * parameters + 16 * parameters // ranks


def deepspeed_zero3_bytes(parameters: int, largest_layer_parameters: int, ranks: int) -> int:
    """Bytes of model states under ZeRO-3 without offloading: 18N/D, and 4 bytes per parameter of the largest
    layer.

    DeepSpeed's documentation, "Memory Requirements" (estimate_zero3_model_states_mem_needs).
    """
    return 4 * largest_layer_parameters + 18 * parameters // ranks


def deepspeed_zero2_run_bytes(run: TrainingRun) -> int:
    """The first for a run under ZeRO-2, or of one rank."""
    _refuse_deepspeed(run, 2)
    return deepspeed_zero2_bytes(run.model.parameters, run.world_size)


def deepspeed_zero3_run_bytes(run: TrainingRun) -> int:
    """The second for a run under ZeRO-3, or of one rank."""
    _refuse_deepspeed(run, 3)
    return deepspeed_zero3_bytes(run.model.parameters, largest_layer(run), run.world_size)


def largest_layer(run: TrainingRun) -> int:
    """Parameters of the module that owns the most: a linear layer's matrix and bias, or the embedding."""
    layers: dict[str, int] = {}
    for name, shape in [*block_shapes(run.model).items(), *outer_shapes(run.model).items()]:
        module = name.rpartition(".")[0]
        layers[module] = layers.get(module, 0) + prod(shape)
    return max(layers.values())


def _refuse_deepspeed(run: TrainingRun, stage: int) -> None:
    formula = f"DeepSpeed's ZeRO-{stage} estimate"
    _refuse_what_none_covers(formula, run)
    _refuse_fp32(formula, run)
    _refuse(
        formula,
        (run.world_size > 1 and run.zero_stage != stage, f"ZeRO stage {run.zero_stage}"),
        (run.tensor_parallel > 1, "tensor parallelism"),
    )


# Hugging Face accelerate, `accelerate estimate-memory`


def accelerate_stages(run: TrainingRun) -> Parts:
    """Bytes at four stages of training with Adam: in fp32 the step takes four times the model, 16N.

    accelerate, commands/estimate.py, estimate_training_usage: with 16-bit autocast, gradients are fp32 and
    16-bit, optimizer states two times the model, and the step has nothing but those. Activations are in none
    of them.
    """
    formula = "accelerate estimate-memory"
    _refuse_what_none_covers(formula, run)
    _refuse(
        formula,
        (run.precision.weight != 4, f"{run.precision.name}: it takes fp32 weights, alone or under autocast"),
        (run.world_size > 1 or run.tensor_parallel > 1, "several ranks"),
    )
    model = 4 * run.model.parameters
    if not run.precision.autocast:
        return {"model": model, "gradients": model, "optimizer": 2 * model, "step": 4 * model}
    return {"model": model, "gradients": model + model // 2, "optimizer": 2 * model, "step": 2 * model}


def accelerate_bytes(run: TrainingRun) -> int:
    """Bytes that `accelerate estimate-memory` prints for training: the largest stage, not their sum."""
    return max(accelerate_stages(run).values())


# All of them, for the evidence


@dataclass(frozen=True)
class Formula:
    """One published formula: what its authors call it, what it counts, its source, how it is computed.

    `counts` is "states" (weights, gradients, optimizer states), "activations" (kept when forward ends),
    "activations and loss" (kept when the loss is there), or "total" (the peak of a step).
    """

    name: str
    counts: str
    source: str
    bytes: Callable[[TrainingRun], int]


def _total(parts: Callable[[TrainingRun], Parts]) -> Callable[[TrainingRun], int]:
    return lambda run: sum(parts(run).values())


FORMULAS = (
    Formula("ZeRO: states", "states", "Rajbhandari et al. 2020, section 3.1", _total(zero_run_state_bytes)),
    Formula(
        "ZeRO: 12hbsL", "activations", "the same, section 3.2", lambda run: zero_bytes(run)["activations"]
    ),
    Formula("ZeRO: all", "total", "the same, section 3", _total(zero_bytes)),
    Formula(
        "Korthikanti: blocks",
        "activations",
        "Korthikanti et al. 2022, table 2",
        lambda run: korthikanti_parts(run)["blocks"],
    ),
    Formula("Korthikanti: all", "activations and loss", "the same, section 4.3", _total(korthikanti_parts)),
    Formula("Megatron-LM", "total", "theoretical_memory_usage.py", _total(megatron_parts)),
    Formula("EleutherAI cookbook", "total", "calc_transformer_mem.py", _total(cookbook_parts)),
    Formula("llm-analysis", "total", "analysis.py", _total(llm_analysis_parts)),
    Formula("Ultra-Scale Playbook: text", "total", "Tazi et al. 2025", _total(playbook_parts)),
    Formula(
        "Ultra-Scale Playbook: figure", "total", "the same, src/memory.js", _total(playbook_figure_parts)
    ),
    Formula("DeepSpeed ZeRO-2", "states", "Memory Requirements", deepspeed_zero2_run_bytes),
    Formula("DeepSpeed ZeRO-3", "states", "Memory Requirements", deepspeed_zero3_run_bytes),
    Formula("accelerate", "total", "accelerate estimate-memory", accelerate_bytes),
)
