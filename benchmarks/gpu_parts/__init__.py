"""Parts of `benchmarks.gpu_suite`: each measures one thing on a CUDA device, in a process of its own."""
