"""`python -m vision_sft`, as ranks are started."""

from vision_sft.cli import main

main()
