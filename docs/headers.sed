# The headers as Doxygen takes them: their comments are about what follows, one at the end of a line
# about that line, and the first of a file about the file; the namespace that carries the ABI is
# nobody's word.
1s|^// |/// @file\n/// |
s|^( *)//( \|$)|\1///\2|
s|([^ ] +)// |\1///< |
s|pycollect::inline PYCOLLECT_ABI|pycollect|
