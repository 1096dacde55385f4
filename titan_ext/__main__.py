# SPDX-License-Identifier: BSD-3-Clause
"""``python -m titan_ext``: the command line tool where its console script is not on PATH."""

import sys

from titan_ext.config_registry.commands import main

sys.exit(main())
