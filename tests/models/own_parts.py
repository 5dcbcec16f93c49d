"""Parts of a network as a user writes them, named by class path."""

from torch import nn


class Mean(nn.Module):
    """A picture's mean of each channel."""

    def __init__(self, shape, config):
        super().__init__()
        self.num_outputs = shape[0]

    def forward(self, x):
        return x.mean((2, 3))


class Sum(nn.Module):
    """A vector's sum."""

    def __init__(self, shape, config):
        super().__init__()
        self.num_outputs = 1

    def forward(self, x):
        return x.sum(-1, keepdim=True)


class Half(nn.Module):
    """A decoder that keeps the first half."""

    def __init__(self, num_inputs, config):
        super().__init__()
        self.num_outputs = num_inputs // 2

    def forward(self, x):
        return x[:, : self.num_outputs]


class Forgetful(nn.Module):
    """Does not say how many numbers it returns."""

    def __init__(self, *_):
        super().__init__()


class Trained(nn.Module):
    """Layers without bias whose weights were learned elsewhere."""

    num_outputs = 3

    def __init__(self, shape, config):
        super().__init__()
        self.linear = nn.Linear(shape[0], 3, bias=False)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x):
        return self.linear(x)


class Picky(nn.Module):
    """Wants more than it is given."""

    def __init__(self, shape, config, more):
        super().__init__()
