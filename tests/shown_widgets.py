"""What cells that show widgets leave behind, run in a kernel of their own as a notebook would run them."""

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


def widgets_shown(*cells: str) -> list[NotebookNode]:
    """What cells that show widgets leave in a notebook, without the ids, which are random."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(notebook, timeout=1200, kernel_name="python3", shutdown_kernel="immediate").execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    for output in outputs:
        output["data"].pop("application/vnd.jupyter.widget-view+json")
    return outputs
