"""The course's notebooks as `lab` opens them.

Without this, JupyterLab marks each as changed once its kernel has told its language, whose version differs
between machines.
"""

from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager


class CourseContents(AsyncLargeFileManager):
    """JupyterLab's own files, but a notebook of the course has the language of this environment's kernel."""

    async def get(self, path: str, content: bool = True, *form: Any, **options: Any) -> dict[str, Any]:
        model: dict[str, Any] = await super().get(path, content, *form, **options)
        if content and model["type"] == "notebook" and "course" in model["content"]["metadata"]:
            model["content"]["metadata"]["language_info"] = dict(IPythonKernel.language_info)
        return model
