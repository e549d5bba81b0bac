"""The page of what real GPUs have told, docs/gpu_results.md: made by `build` from the recordings, and nothing else."""

from pathlib import Path

from ..benchmark.gpu import GPU_TABLES

PAGE = Path("docs", "gpu_results.md")

HEAD = """# On real GPUs

What this course claims, beside what GPUs counted and how long they took. The tables are made from the recordings in
`course_utils/measuring/recordings` whenever the course is built. [How they are recorded](gpu.md) takes half an hour on
any NVIDIA GPU.
"""


def gpu_page() -> str:
    """The page as Markdown, the same whenever and wherever it is made from the same recordings."""
    tables = [table for made in GPU_TABLES.values() for table in made()]
    return "\n".join([HEAD, *(f"{table.page()}\n" for table in tables)])
