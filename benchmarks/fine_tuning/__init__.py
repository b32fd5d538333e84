"""Suite `finetune`: LoRA on a CPU, of codes and of dense weights."""
