# SPDX-License-Identifier: BSD-3-Clause
"""``python -m titan_ext``: the command line tool where its console script is not on PATH."""

import sys

from titan_ext.cli import main

sys.exit(main())
