"""One denoising step of diffusion transformers on several GPUs, beside Diffusers' own context parallelism."""
