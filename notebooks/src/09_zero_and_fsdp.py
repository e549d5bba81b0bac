# ---
# jupyter:
#   course:
#     minutes: 75
#     budget_seconds: 90
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · ZeRO and FSDP
#
# **75 minutes.** You should know data parallelism ([lesson 08](08_data_parallelism.ipynb)) and the 16 bytes a
# parameter of mixed-precision Adam ([lesson 03](03_mixed_precision.ipynb)). No GPU is needed: four processes of your
# computer stand for four GPUs, and where a measurement is simulated, it says so.
#
# In data parallelism every rank keeps the same weights, the same gradients and the same optimizer states. 64 GPUs, 64
# copies. [ZeRO](../docs/glossary.md#zero) keeps nothing twice: each rank owns a [shard](../docs/glossary.md#shard), and
# what it needs of the others it gets when it needs it. How much does that save, what does it send, and what does the
# formula leave out?

# %% [markdown]
# ## One stack, cut three ways
# Letters, as in the paper: Ψ parameters, D ranks, K bytes a parameter of [optimizer
# states](../docs/glossary.md#optimizer-states). With mixed-precision Adam a rank keeps 2 bytes a parameter of weights,
# 2 of gradients and K = 12.
#
# The paper's example is a model of 7.5 billion parameters on 64 ranks. **Your guess.** How many GB of states does one
# rank keep when all three are cut?

# %%
from course_utils.interactive.guesses import predict, reveal

N, D = 7_500_000_000, 64
print(f"nothing cut: (2 + 2 + 12)·Ψ = {16 * N / 1e9:.0f} GB on every rank")
predict("09.stage3", unit="GB")

# %% [markdown]
# | stage | what is cut | bytes on one rank |
# |---|---|---|
# | none | nothing | (2 + 2 + K)·Ψ |
# | 1 | optimizer states | 4Ψ + KΨ/D |
# | 2 | and gradients | 2Ψ + (2 + K)Ψ/D |
# | 3 | and parameters | (4 + K)Ψ/D |

# %%
from course_utils.lessons.sharding.zero import cut_three_ways
from course_utils.figures import stack

rows = cut_three_ways(N, D)
cited = "formulas of Rajbhandari et al. 2020, section 5"
stack(rows, f"Cut by {D}, 120 GB of states become {sum(rows['stage 3: + parameters'].values()) / 1e9:.1f} GB",
      capacity=32_000_000_000, capacity_label="a GPU of 32 GB", provenance=cited)  # fmt: skip

# %%
from course_utils.estimating.sharding import zero_bytes

for stage, words in enumerate(("4Ψ + 12Ψ", "4Ψ + 12Ψ/D", "2Ψ + 14Ψ/D", "16Ψ/D")):
    print(f"stage {stage}: {words:11s} = {zero_bytes(N, D, stage) / 1e9:.4g} GB")
reveal("09.stage3", zero_bytes(N, D, 3))

# %% [markdown]
# These are the numbers of figure 1 in [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), to rounding: 120,
# 31.4, 16.6, 1.9 GB. The paper's table 1 goes on to 1,024 ranks and a trillion parameters. Here it is, computed; a star
# marks what fits the paper's cards of 32 GB.

# %%
sizes = {"7.5 billion": N, "128 billion": 128 * 10**9, "1 trillion": 10**12}
print("GB at stage 1, 2, 3")
print("   D", *(f"{name:>32s}" for name in sizes))
for d in (1, 4, 16, 64, 256, 1024):
    cells = [zero_bytes(psi, d, stage) / 1e9 for psi in sizes.values() for stage in (1, 2, 3)]
    print(f"{d:4d}", *(f"{size:9,.2f}{'*' if size <= 32 else ' '}" for size in cells))

# %% [markdown]
# Only stage 3 ever brings the two large ones there. Look at stages 1 and 2 once more: they have a floor that no number
# of ranks breaks, 4Ψ and 2Ψ.

# %%
from course_utils import gpu
from course_utils.figures import lines

ranks = [2**k for k in range(11)]
lines(
    {f"stage {stage}": (ranks, [zero_bytes(N, d, stage) / 1e9 for d in ranks]) for stage in range(4)},
    "Stages 1 and 2 run into a floor; stage 3 falls with every rank",
    "D, ranks", "GB of states on each rank", log_x=True, log_y=True,
    level=("A100-40GB", gpu("A100-40GB").memory / 1e9), provenance=cited,
)  # fmt: skip

# %% [markdown]
# ## What does it send?
# Sharded things have to travel. **Your guess.** Plain data parallelism sends 2Ψ numbers per rank and step (lesson 08).
# How many times as much does stage 3 send?

# %%
predict("09.price", unit="times")

# %% [markdown]
# The key is that an [all-reduce](../docs/glossary.md#all-reduce) has two halves. *Reduce-scatter*: each rank ends with
# one slice of the sum. *All-gather*: everybody collects all slices. Each half sends Ψ (more exactly (D−1)/D·Ψ; we leave
# that factor out, as the paper does).

# %%
from course_utils.lessons.sharding.zero import all_gather, reduce_scatter

gradients = [[1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 0.0]]  # of four parameters, on two ranks
slices = reduce_scatter(gradients)
print("after the reduce-scatter:", *(f"rank {rank} has {part}" for rank, part in enumerate(slices)), sep="\n  ")
print("after the all-gather:    ", *(f"rank {rank} has {whole}" for rank, whole in enumerate(all_gather(slices))),
      sep="\n  ")  # fmt: skip

# %% [markdown]
# Between the two halves each rank has exactly the gradients of its slice. That is all its optimizer needs! So step
# there, and gather new *weights* in place of gradients. Stages 1 and 2 send what data parallelism sends: 2Ψ. Stage 3
# has no weights left between steps: it gathers them for forward, again for backward, and reduce-scatters gradients.
# Three times Ψ (section 7 of the paper).

# %%
from course_utils.estimating.sharding import zero_communication_elements
from course_utils.figures import bars

psi = {f"stage {stage}": zero_communication_elements(N, stage) / N for stage in range(4)}
bars(psi, "Stage 3 sends half as much again; the other stages cost nothing more", unit="Ψ", highlight="stage 3",
     provenance="formulas of Rajbhandari et al. 2020, section 7")  # fmt: skip

# %%
reveal("09.price", psi["stage 3"] / psi["stage 0"], unit="times")

# %% [markdown]
# ## Four real ranks
# Formulas are promises. Now four processes of your computer train a small GPT together, each tracked. Stage 1 is
# PyTorch's `ZeroRedundancyOptimizer`; stages 2 and 3 are [FSDP](../docs/glossary.md#fsdp)2, `fully_shard`, with
# `reshard_after_forward` False and True. They run in fp32: 4 + 4 + 8 bytes a parameter. The sizes are odd on purpose,
# so that 4 ranks divide almost nothing. A fifth run has FSDP2's own mixed precision, a `MixedPrecisionPolicy`: weights
# are gathered and used in [bf16](../docs/glossary.md#fp16-and-bf16), and its shards are fp32.
#
# **Your guess.** Between backward and the optimizer's step, how many MB does rank 0 keep at stage 2?

# %%
from course_utils import format_bytes
from course_utils.lessons.sharding.zero import formula, padded_elements, sent_elements, state_terms
from course_utils.lessons.sharding.real_ranks import by_stage, on_real_ranks, small_run

runs = by_stage(small_run(ranks=4))
runs["stage 3, bf16"] = runs["stage 3"].replace(precision="bf16-master")
model = runs["stage 0"].model
print(f"Ψ = {model.parameters:,}, h = {model.hidden}, V = {model.vocab}")
for name, run in runs.items():
    print(f"{name}: {format_bytes(sum(formula(run).values()), 'MB', 2)} by ZeRO's formula")
predict("09.real", unit="MB")

# %% [markdown]
# The next cell starts the four processes once, for all five runs. It takes 15 seconds or more.

# %%
found = on_real_ranks(runs)
rank_0 = {name: ranks[0].states for name, ranks in found.ranks.items()}
stack(rank_0, "Real ranks: less at each stage, but stage 2 keeps as little as stage 3", unit="MB",
      provenance=f"rank 0 between backward and step · {found.provenance}")  # fmt: skip

# %%
reveal("09.real", sum(rank_0["stage 2"].values()), unit="MB")
kinds = ("parameters", "gradients", "optimizer_states", "communication")
print(f"{f'MB: formula → {found.word}':24s}", *(f"{kind:>17s}" for kind in kinds))
for name, run in runs.items():
    pairs = [f"{formula(run).get(kind, 0) / 1e6:.2f} → {rank_0[name][kind] / 1e6:5.2f}" for kind in kinds]
    print(f"{name:24s}", *(f"{pair:>17s}" for pair in pairs))

# %% [markdown]
# Stages 0 and 1 have communication that no formula mentions. Stage 2 and mixed precision divide their bytes otherwise
# than ZeRO does. Here is every byte of the difference, by name.

# %%
for name, run in runs.items():
    measured = sum(rank_0[name].values())
    terms = state_terms(run, rank=0, counters=found.real)
    print(f"{name}: {found.word} {measured:,} bytes")
    for term, size in terms.items():
        print(f"    {term:26s} {size:+14,}")
    print(f"    {'left unexplained':26s} {measured - sum(terms.values()):+14,}")

# %% [markdown]
# **The gap**, and its names:
#
# - *Buckets.* `DistributedDataParallel` copies gradients into buckets to send them, so they are there twice (lesson 08;
#   `gradient_as_bucket_view=True` avoids it).
# - *Parameters sharded, too.* FSDP2's stage 2 is no ZeRO-2. Between steps it keeps shards of the parameters, as stage 3
#   does. It gathers them for forward and keeps them whole until backward is over; ZeRO-2 keeps them whole all the time.
# - *Formats.* In bf16 FSDP2's shards are fp32, and so are their gradients: 4 + 4 + 8 bytes in place of 2 + 2 + 12. The
#   shard is the master copy itself. The sum is the same, so it needs no line of its own.
# - *Uneven shares.* `ZeroRedundancyOptimizer` hands out whole tensors, and those do not come out even.
# - *Padding.* FSDP2 cuts each parameter by rows, and pads until D divides them.
# - *Blocks of 512 bytes*: the allocator's rounding.
# - *Step counters*: on a CPU, Adam's live in the same memory.
#
# One thing could be there and is not: *buffers* (a stored mask, a table of positions) are no parameters, and every rank
# would keep them whole. Do these networks have any?

# %%
from course_utils.model_files import model_config
from course_utils.networks import build_network

for config in (model, model_config("tiny-llama")):
    print(f"{config.name}: {len(list(build_network(config, 'eager').buffers()))} buffers")

# %%
for name in ("stage 1", "stage 3"):
    states = [ranks.states["optimizer_states"] for ranks in found.ranks[name]]
    print(f"{name}, optimizer states of the four ranks: {', '.join(f'{size:,}' for size in states)} bytes")
shards, padding = padded_elements(runs["stage 3"])
print(f"stage 3: {shards:,} elements in all shards together, {padding:,} of them padding ({padding / shards:.2%})")

# %% [markdown]
# Stage 1's ranks differ as whole tensors do. At stage 3 the last rank has the short end: fewer real rows, so less of
# Adam's moments. Padding is small here. It grows with D: cut a norm's h numbers into 64 and h = 250 becomes 256; a
# vector of 3 numbers on 64 ranks is nearly all padding.
#
# What did they send, and did they learn the same?

# %%
for name, run in runs.items():
    sent, N = found.ranks[name][0].sent, run.model.parameters
    said = ", ".join(f"{what} {elements / N:.3f}Ψ" for what, elements in sent.items())
    total, promised = sum(sent.values()), zero_communication_elements(N, run.zero_stage)
    print(f"{name}: {said}; together {total / N:.3f}Ψ, ZeRO's formula {promised / N:.0f}Ψ")
assert all(found.ranks[name][0].sent == sent_elements(run) for name, run in runs.items())
print(f"stages 0 to 3: {found.lost_alike(*by_stage(run))}")

# %% [markdown]
# **The gap.** Stage 1 as PyTorch has it sends 3Ψ, not 2Ψ: DDP all-reduces whole gradients, 2Ψ, then each rank
# broadcasts what it has stepped, Ψ more. Stage 2 sends 2Ψ and its padding. Stage 3 sends less than 3Ψ: what is outside
# the blocks (embeddings, head, last norm) is one unit that stays gathered from forward to backward. In a deep model
# that is a small part. And the mathematics is that of plain data parallelism: only places differ.

# %% [markdown]
# ## The peak within a step
# The formula is about what persists between steps. Within a step weights have to be whole somewhere, for a moment.
#
# **Your guess.** Llama-3 8B on 64 ranks at stage 3, one sequence of 4,096 tokens on each. Full
# [recomputation](../docs/glossary.md#activation-recomputation) keeps activations small, and a [loss in
# chunks](../docs/glossary.md#chunked-loss) the [logits](../docs/glossary.md#logits). ZeRO's formula is printed below.
# How many GB does rank 0 take at its peak?

# %%
from course_utils import TrainingRun, estimate, measure

llama = TrainingRun("llama3-8b", 1, 4096, "bf16-master", recompute="full", world_size=64, zero_stage=3, loss_chunks=8)
print(f"16Ψ/D = {format_bytes(sum(formula(llama).values()), 'GB', 2)}")
predict("09.peak", unit="GB")

# %% [markdown]
# Rank 0 of 64 is simulated: PyTorch's genuine `fully_shard`, with 63 ranks that are not there. This takes some 15
# seconds.

# %%
rank = measure(llama)
rows = {"ZeRO's formula": formula(llama), f"peak, {rank.word}": rank.breakdown}
stack(rows, f"The peak is {rank.peak / sum(formula(llama).values()):.1f} times the formula: gathered weights",
      provenance=str(rank.provenance))  # fmt: skip

# %%
from course_utils.lessons.sharding.zero import gathered_terms

reveal("09.peak", rank.peak)
print(f"estimate − {rank.word}: {estimate(llama).total - rank.peak:+,} bytes")
for name, size in gathered_terms(llama).items():
    print(f"    {name:34s} {format_bytes(size, 'GB', 2):>8s}")
gap = sum(gathered_terms(llama).values()) - rank.breakdown["communication"]
print(f"    their sum − {rank.word} communication: {gap:+,} bytes")

# %% [markdown]
# **The gap** has names again, and none of them shrinks with D. FSDP2 gathers *units*: here each block, and all that is
# outside of them. The largest unit is the outermost: Llama's embedding and head, gathered in bf16 from forward to the
# end of backward, and then their whole gradient. Beside it stand the block at work, the next one on its way, and the
# last block's gradients, flattened in fp32 to be reduced. So of a model's peak at stage 3, this part is a constant.
# (The loss can be another: without chunks, three fp32 tensors of s·b·V numbers make the peak of this run, and no rank
# takes any part of them.)

# %%
sizes = {"states, 16Ψ/D": [], "peak, estimated": []}
ranks = [8, 16, 32, 64, 128, 256, 512]
for d in ranks:
    run = llama.replace(world_size=d)
    sizes["states, 16Ψ/D"].append(sum(formula(run).values()) / 1e9)
    sizes["peak, estimated"].append(estimate(run).total / 1e9)
lines({name: (ranks, values) for name, values in sizes.items()},
      "Beyond some tens of ranks the peak of Llama-3 8B hardly falls", "D, ranks", "GB on rank 0", log_x=True,
      provenance="FSDP2, stage 3, estimated from formulas")  # fmt: skip

# %% [markdown]
# ## Four knobs and their bytes
# What you wrap, when you let go, how far ahead you gather, and in which format. **Your guess.** A GPT of 6 blocks on 64
# ranks: with a unit for each block, the peak is what you see below. What is it if the whole model is *one* unit?

# %%
from course_utils.lessons.sharding.units import Units, in_units, six_blocks

six = six_blocks(ranks=64)
blocks = measure(six)
print(f"16Ψ/D = {format_bytes(sum(formula(six).values()), 'MB', 0)}; peak {format_bytes(blocks.peak, 'MB', 0)}")
predict("09.unit", unit="MB")

# %%
peaks = {
    "a unit a block": blocks,
    "no reshard (stage 2)": measure(six.replace(zero_stage=2)),
    "all in fp32": measure(six.replace(precision="fp32", attention="efficient")),
    "autocast": measure(six.replace(precision="amp-bf16")),
}
peaks |= in_units(six, {"2 blocks ahead": Units(ahead=2), "one unit": Units(whole=True)})
stack(peaks, "What is gathered at once decides: one unit for everything undoes stage 3", unit="MB",
      provenance=str(blocks.provenance))  # fmt: skip

# %%
one_block = gathered_terms(six)["a block, gathered"]
for name, peak in peaks.items():
    change = peak.breakdown["communication"] - blocks.breakdown["communication"]
    print(f"{name:22s} communication {format_bytes(peak.breakdown['communication'], 'MB', 1):>9s}, "
          f"{change / one_block:+5.2f} blocks")  # fmt: skip
if "one unit" in peaks:
    reveal("09.unit", peaks["one unit"].peak, unit="MB")

# %% [markdown]
# | knob | what it buys | what it costs |
# |---|---|---|
# | `fully_shard` on each block | only one block is whole at a time | an all-gather for each block |
# | `reshard_after_forward=False` | no second gather: 2Ψ in place of 3Ψ | all blocks whole at the end of forward |
# | `MixedPrecisionPolicy` in bf16 | gathers and weights of half the size | (shards stay fp32) |
# | [autocast](../docs/glossary.md#autocast) instead | sensitive operations in fp32 | gathers in fp32, copies in bf16 |
# | one more block of prefetch | its gather hides behind arithmetic | its flat buffer |
#
# Autocast keeps a bf16 copy of every weight that it casts, and resharding cannot free those copies. By the end of
# forward each rank holds nearly the whole model in bf16. So use FSDP2's policy. For Llama-3 8B on 64 ranks:

# %%
for precision, words in (("bf16-master", "FSDP2's policy"), ("amp-bf16", "autocast")):
    peak = estimate(llama.replace(precision=precision))
    copies = format_bytes(peak["weight_copies"], "GB", 1)
    print(f"{words:15s} estimated peak {format_bytes(peak.total, 'GB', 1):>7s}, copies of weights {copies:>7s}")

# %% [markdown]
# "a unit a block" gathers in bf16 and, in backward, the next block ahead: torch's own choice. In a timeline it is a
# comb: each block is gathered, used and let go, in forward and once more in backward. Without resharding, forward is a
# staircase.

# %%
from course_utils.figures import timeline

timeline(blocks, "Stage 3: each of the 6 blocks comes and goes twice", unit="MB", steps=[2])

# %%
timeline(peaks["no reshard (stage 2)"], "Stage 2: gathered once, and whole until backward", unit="MB", steps=[2])

# %% [markdown]
# ## GPT-2 XL and Llama-3 8B, 8 ranks and 64
# Now both models at all stages. The estimates of FSDP2 have agreed with the simulation to the byte so far; the cells
# after the table check three more.

# %%
models = {"GPT-2 XL": TrainingRun("gpt2-xl", 1, 1024, "bf16-master", recompute="full"),
          "Llama-3 8B": llama.replace(world_size=1, zero_stage=0)}  # fmt: skip
rows = {
    f"{name}, {d}: stage {stage}": estimate(run.replace(world_size=d, zero_stage=stage))
    for name, run in models.items() for d in (8, 64) for stage in (2, 3)
}  # fmt: skip
stack(rows, "From 8 ranks to 64 states shrink by 8, and peaks by far less", capacity=gpu("A100-40GB"),
      provenance="peaks of FSDP2's rank 0, estimated from formulas")  # fmt: skip

# %%
print("rank 0, GB: formula → peak  ", *(f"{f'stage {stage}':>16s}" for stage in range(4)))
for name, run in models.items():
    for d in (8, 64):
        row = [run.replace(world_size=d, zero_stage=stage) for stage in range(4)]
        cells = [f"{sum(formula(one).values()) / 1e9:7.1f} → {estimate(one).total / 1e9:5.1f}" for one in row]
        print(f"{name + ', ' + str(d):28s}", *(f"{cell:>16s}" for cell in cells))

# %%
xl = models["GPT-2 XL"].replace(world_size=8, zero_stage=3)
small = measure(xl)
print(f"GPT-2 XL, 8 ranks, stage 3: estimate − {small.word} {estimate(xl).total - small.peak:+,} bytes")
temporaries = format_bytes(small.breakdown["temporaries"], "GB", 2)
print(f"its peak is in {small.peak_phase}, where {temporaries} are temporaries")

# %% [markdown]
# Two of the four are not simulated yet. Each takes a quarter of a minute, so here are simulations that came with the
# course; `measure(run)` makes them anew.

# %%
for run in (xl.replace(world_size=64), llama.replace(world_size=8)):
    recorded = measure(run, "recorded")
    print(f"{run.model.name}, {run.world_size} ranks, stage 3: estimate − recorded "
          f"{estimate(run).total - recorded.peak:+,} bytes; its peak is in {recorded.peak_phase}")  # fmt: skip
print(recorded.provenance)

# %% [markdown]
# GPT-2 XL on 8 ranks is fullest in the step of the optimizer: its
# [foreach](../docs/glossary.md#foreach-for-loop-fused) temporaries are 4 bytes for each parameter of the *shard*, 20Ψ/D
# in all. On 64 ranks backward is fuller, and for Llama-3 8B on 8 already: a unit that is gathered or reduced there is
# whole, whatever D is. Which of the two wins depends on D and on the largest unit.

# %% [markdown]
# ## Try it
# Ranks and stage under your fingers. Find out: on how many A100s of 40 GB does Llama-3 8B fit at stage 1? At stage 2?
# And from where on does it not help to add ranks at stage 3?

# %%
from course_utils.lessons.sharding.widget import shard_sliders

shard_sliders("llama3-8b", ranks=8, stage=2, gpu="A100-40GB", seq_len=4096, loss_chunks=8)

# %%
for stage in (1, 2, 3):
    peak_of = {2**k: estimate(llama.replace(world_size=2**k, zero_stage=stage)).total for k in range(1, 11)}
    enough = [d for d, peak in peak_of.items() if peak <= gpu("A100-40GB").memory]
    words = f"from {enough[0]} ranks on" if enough else "on no number of ranks up to 1,024"
    print(f"stage {stage}: Llama-3 8B fits A100s of 40 GB {words}")
for d in (4, 16, 64, 256):
    saved = 100 * (1 - peak_of[2 * d] / peak_of[d])
    print(f"stage 3, from {d} ranks to {2 * d}: the peak falls by {saved:.0f} %")

# %% [markdown]
# ## When is the price hidden?
# Sending and computing can overlap. A token costs about 6 [FLOPs](../docs/glossary.md#flops) a parameter ([Kaplan et
# al. 2020](https://arxiv.org/abs/2001.08361), section 2.1), and a step sends a fixed number of bytes a parameter. So
# the parameters cancel, and what remains is a number of tokens: with more of them on each rank, arithmetic takes longer
# than sending.
#
# **Your guess.** An A100 computes at most 312·10¹² FLOPs a second and sends 300 GB/s over NVLink (NVIDIA's data sheet).
# Stage 3 sends 3Ψ numbers of 2 bytes. How many tokens does each rank need?

# %%
predict("09.tokens", unit="tokens")

# %%
from course_utils.lessons.sharding.zero import offload, tokens_to_hide

a100 = gpu("A100-80GB").rates  # of its data sheet: FLOP/s, and bytes/s in one direction
ways = {
    "stage 3 over NVLink": tokens_to_hide(3 * 2, a100.tensor, a100.link),
    "… gradients summed in fp32": tokens_to_hide(2 * 2 + 4, a100.tensor, a100.link),
    "stages 0 to 2 over 100 Gbit/s": tokens_to_hide(2 * 2, a100.tensor, 100e9 / 8),
    "stage 3 over 100 Gbit/s": tokens_to_hide(3 * 2, a100.tensor, 100e9 / 8),
    "offloading over PCIe 4.0": tokens_to_hide(4, a100.tensor, a100.host),
}
bars(ways, "The slower the link, the more tokens each rank needs to hide it", unit="tokens",
     provenance="closed form at the data sheets' rates; real arithmetic and real links both stay below")  # fmt: skip

# %%
reveal("09.tokens", ways["stage 3 over NVLink"], unit="tokens")
print(f"PCIe 4.0 with 16 lanes: 16 · 16 GT/s · 128/130 / 8 = {16 * 16 * 128 / 130 / 8:.1f} GB/s each way")

# %% [markdown]
# The second bar is FSDP2 as you ran it: weights travel in bf16, gradients in fp32. That is 3Ψ *numbers* as before, but
# 8 bytes a parameter, not 6.
#
# **The gap** to a real cluster: nobody reaches the rates of data sheets, latency comes on top when shards are small,
# and accumulation changes the sums. FSDP2 gathers for each
# [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) anew, so stage 3 pays at least 2Ψ for each one.

# %% [markdown]
# ## Offloading: the host as a rank
# [ZeRO-Offload](https://arxiv.org/abs/2101.06840) (Ren et al. 2021) leaves 16-bit weights on the GPU. Gradients go to
# the host as they come, the host keeps the optimizer's states and steps, and new weights come back.
#
# **Your guess.** For 7.5 billion parameters on one GPU: how many seconds does a step spend on a PCIe 4.0 link, if
# nothing overlaps?

# %%
predict("09.offload", unit="s")

# %%
for d in (1, 8):
    moved = offload(7_500_000_000, ranks=d)
    print(f"{d} rank{'s' * (d > 1)}: {format_bytes(moved.gpu, 'GB', 1)} stay on each GPU, "
          f"{format_bytes(moved.host, 'GB', 1)} in the host for it, "
          f"{format_bytes(moved.link, 'GB', 2)} over its link, {moved.seconds(a100.host):.2f} s")  # fmt: skip
reveal("09.offload", offload(7_500_000_000).seconds(a100.host), unit="s")

# %% [markdown]
# Eight times less on the GPU: 2 bytes a parameter instead of 16, for 4 bytes a parameter over the link and the
# optimizer's arithmetic on the host's processor. With several ranks each moves its own share alone, so the price falls
# with D. What real machines make of it depends on the host: it is not measured here.

# %% [markdown]
# ## What ZeRO does not cut: activations
# ZeRO shards states. Every rank keeps all activations of its own micro-batch. To cut those, split the *matrices*:
# [tensor parallelism](../docs/glossary.md#tensor-parallelism). Each of t ranks computes a part of the heads and of the
# MLP. But norms, their dropout and the inputs of both halves stay whole on every rank. *[Sequence
# parallelism](../docs/glossary.md#sequence-parallelism)* cuts those along the sequence.
#
# **Your guess.** GPT-3, one sequence, [eager attention](../docs/glossary.md#eager-attention): all blocks keep what you
# see below. With tensor parallelism of 8, by what factor does that fall?

# %%
from course_utils.estimating.megatron import activation_bytes

gpt3 = TrainingRun("gpt3-175b", 1, 2048, "bf16-master", attention="eager")
print(f"one GPU: {format_bytes(activation_bytes(gpt3), 'GB', 0)}")
predict("09.tensor", unit="times")

# %%
eight = gpt3.replace(tensor_parallel=8)
sequence = eight.replace(sequence_parallel=True)
kept = {
    "t = 1": activation_bytes(gpt3),
    "t = 8": activation_bytes(eight),
    "t = 8, sequence parallel": activation_bytes(sequence),
    "and selective recomputation": activation_bytes(sequence.replace(recompute="selective-attention")),
}
factor = kept["t = 1"] / kept["t = 8"]
bars(kept, f"Tensor parallelism of 8 cuts activations by {factor:.1f}; sequence parallelism makes it 8",
     provenance="Korthikanti et al. 2022, table 2: GPT-3, s = 2,048, b = 1")  # fmt: skip

# %% [markdown]
# | per block, in units of s·b·h bytes | |
# |---|---|
# | one GPU | 34 + 5·a·s/h |
# | tensor parallel | 10 + 24/t + 5·a·s/(h·t) |
# | and sequence parallel | (34 + 5·a·s/h) / t |
# | and selective recomputation | 34/t |

# %%
from course_utils.estimating.megatron import communication_elements

reveal("09.tensor", factor, unit="times")
s, b, h, a, t = 2048, 1, gpt3.model.hidden, gpt3.model.heads, 8
by_hand = (10 + 24 / t + 5 * a * s / (h * t)) * s * b * h * gpt3.model.layers
print(f"by hand: {by_hand / 1e9:.1f} GB, difference {by_hand - kept['t = 8']:+.0f} bytes")
print(f"all-reduced for it, forward and backward: 4·s·b·h a block, {communication_elements(eight):,} numbers")
for degree in (2, 4, 8, 16):
    each = activation_bytes(gpt3.replace(tensor_parallel=degree))
    print(f"t = {degree:2d}: {kept['t = 1'] / each:.1f} times less, {degree} with sequence parallelism")

# %% [markdown]
# **The gap** to t is the 10 that stays whole. And the price is of another kind: ZeRO sends weights, the same however
# many tokens there are; tensor parallelism sends activations, more with every token, and waits for each. So it stays
# within a machine, where links are fast, and ZeRO goes between machines.

# %% [markdown]
# ## What the sources leave out
# | claim | what you computed here |
# |---|---|
# | 1.9 GB for 7.5 B parameters on 64 ranks | states between steps; within a step a unit is whole |
# | stage 1 sends 2Ψ | by reduce-scatter; `ZeroRedundancyOptimizer` behind DDP sends 3Ψ |
# | stage 2 keeps 2Ψ of parameters | FSDP2 keeps them within the step alone |
# | stage 3 sends 3Ψ | a bit less: what is outside the blocks is gathered once |
# | 16Ψ/D | and padding, and blocks of 512 bytes |
#
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(9)

# %% [markdown]
# ## Take home
# **Remember** ZeRO divides states by D; what is whole for a moment, the largest unit and its neighbors, it does not.
#
# **Breaks when** the peak is elsewhere: in activations, in one huge unit, or in a link too slow for few tokens.
#
# **Cheat-sheet line** stage 1: 4Ψ + 12Ψ/D · stage 2: 2Ψ + 14Ψ/D · stage 3: 16Ψ/D bytes, for 2Ψ, 2Ψ, 3Ψ numbers sent
# (PyTorch's stage 1: 3Ψ) · peak at stage 3: + outer unit + 2 blocks in 16-bit + 1 block in fp32 · offload: 2Ψ stay, 4Ψ
# bytes over the link · activations: (10 + 24/t + 5as/ht)·sbh tensor parallel, (34 + 5as/h)·sbh/t with sequence.
#
# Now solve the [exercises of this lesson](../exercises/09_zero_and_fsdp.ipynb).
