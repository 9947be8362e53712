"""Large-minibatch ResNet-50 training after Goyal et al. (2017) and Mikami et al. (2018), on MPI."""

__version__ = "0.1.0"
