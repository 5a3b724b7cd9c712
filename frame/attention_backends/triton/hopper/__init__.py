"""Attention kernels in Gluon for compute capability 9.0, which load by TMA and divide their work
among groups of warps."""
