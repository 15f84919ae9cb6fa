"""Operations of our own in C++, for steps of small models on a CPU."""
