"""What the tests of moving share."""

import torch

from gpumagic.moving.move import move_all

GPU0, GPU1, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


def moved(device=GPU1, followers=(), **variables):
    """Move the keywords as a cell's variables are moved; followers are others of the notebook."""
    return move_all(variables.items(), device, dict(followers))
