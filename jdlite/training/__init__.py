"""Training of DLite drafters: answers of the target, a history teacher, distillation in stages, exact resumption."""
