"""python -m benchmarks.calls: the same as `python -m benchmarks calls`."""

import sys

from benchmarks.__main__ import main

sys.argv.insert(1, "calls")
sys.exit(main())
