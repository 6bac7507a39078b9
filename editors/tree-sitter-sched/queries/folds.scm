[(schedule) (body) (block) (repeated) (row) (overlap) (exchange)] @fold
