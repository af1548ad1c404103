"""Programs that run single operators of torch, such as `opinfo:all`, `opinfo:unary`, `opinfo:nn.functional.relu`."""
