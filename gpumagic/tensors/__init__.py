"""The torch half of gpumagic: the kernel runs it. Each of its modules imports torch."""
