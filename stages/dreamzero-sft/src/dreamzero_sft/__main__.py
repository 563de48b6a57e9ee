"""`python -m dreamzero_sft`: how a launcher starts a rank."""

from dreamzero_sft.cli import main

main()
