"""Convert and inspect distributed checkpoints, at the speed of the disk and in little memory."""
