"""Say anew what the simulated GPU says: `python -m course_utils.benchmark.published [ID …]`, all rows without IDs."""

import sys

from . import save_frozen

if __name__ == "__main__":
    save_frozen(sys.argv[1:])
