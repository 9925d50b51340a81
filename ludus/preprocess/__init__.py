"""Operations on observations before the network and on actions after it."""
