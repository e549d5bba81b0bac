"""How Sphinx makes the website. `python3 -m course_utils site` lays out its sources and runs it."""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, os.environ["COURSE_ROOT"])

from course_utils import __version__

gc.disable()  # a quarter of the time went into searching the trees of all pages for cycles

project = "Where Did the GPU Memory Go?"
author = "The authors of the course"
copyright = "the authors; Apache License 2.0"
release = __version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "site_build"]
root_doc = "docs/index"
exclude_patterns = ["_build", "course_utils"]  # what pages of ours quote is no page itself

# Pages show the outputs that are stored in the notebooks: those that the tests compare.
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 0)]  # pages have no kernel for widgets
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False  # or two prices in a paragraph make a formula
html_math_renderer = "mathml"
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # exercises begin each hint at a level of their own

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # or paths of this machine stand in signatures
autodoc_typehints_format = "short"
default_role = "code"

html_theme = "furo"
html_title = project
# where the site will be: only whole addresses let others show its cards
html_baseurl = os.environ.get("COURSE_URL", "")
html_copy_source = False
html_domain_indices = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_js_files = [("course.js", {"type": "module"})]
html_extra_path = ["_extra"]
