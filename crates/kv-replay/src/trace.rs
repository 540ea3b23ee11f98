//! Request traces: one JSON object a line, checked line by line.
