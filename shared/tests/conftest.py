"""Tests share toy.py and ranks.py; the ranks they start import them by these names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
