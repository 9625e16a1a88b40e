/* A reshard by ScaLAPACK: p?gemr2d copies a matrix from one grid of processes to another. Times it and checks every
 * element.
 *
 *   scalapack_reshard PROBLEM REPEATS SLOW
 *
 * PROBLEM is text: rows and columns; then for source and target: rows and columns of the grid, rows and columns of a
 * block, and the ranks of the grid row by row. Every process has one block at most. Elements are int32 and hold their
 * own linear index plus a number that changes with every repeat. The first round warms up and does not count, unless
 * it takes more than SLOW seconds: then it is the only one.
 * Rank 0 prints {"seconds": [...], "busy": [...], "wrong_elements": n}.
 *
 * ScaLAPACK has columns in memory one after the other; our rows are its columns, so that (columns, rows) is the matrix
 * it sees.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Cblacs_get(int context, int what, int *value);
void Cblacs_gridmap(int *context, int *map, int leading, int rows, int columns);
void Cpigemr2d(int m, int n, int *a, int ia, int ja, int *a_description, int *b, int ib, int jb, int *b_description,
               int context);

typedef struct {
  int grid_rows, grid_columns, block_rows, block_columns;
  int context;                   /* -1 outside the grid */
  int row, column;               /* first element of this rank's block */
  int rows, columns;             /* its size; 0 where there is none */
  int description[9];
  int32_t *data;
} Side;

static int rank, world, rows, columns;

static void fail(const char *what) {
  fprintf(stderr, "scalapack_reshard: %s\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static int least(int a, int b) { return a < b ? a : b; }

static void read_side(FILE *file, Side *side) {
  if (fscanf(file, "%d %d %d %d", &side->grid_rows, &side->grid_columns, &side->block_rows, &side->block_columns) != 4)
    fail("a grid ends early");
  /* The grid that ScaLAPACK sees is ours with rows and columns exchanged; its map has columns one after the other. */
  int *map = malloc(sizeof(int) * (size_t)(side->grid_rows * side->grid_columns));
  side->rows = side->columns = 0;
  for (int i = 0; i < side->grid_rows; ++i) {
    for (int j = 0; j < side->grid_columns; ++j) {
      int *at = &map[i * side->grid_columns + j];
      if (fscanf(file, "%d", at) != 1) fail("the ranks of a grid end early");
      if (*at != rank) continue;
      side->row = i * side->block_rows;
      side->column = j * side->block_columns;
      side->rows = least(side->block_rows, rows - side->row);
      side->columns = least(side->block_columns, columns - side->column);
    }
  }
  Cblacs_get(0, 0, &side->context);
  Cblacs_gridmap(&side->context, map, side->grid_columns, side->grid_columns, side->grid_rows);
  free(map);
  const int local = side->columns > 0 ? side->columns : 1;
  const int description[9] = {1, side->context, columns, rows, side->block_columns, side->block_rows, 0, 0, local};
  memcpy(side->description, description, sizeof description);
  side->data = malloc(sizeof(int32_t) * ((size_t)side->rows * (size_t)side->columns + 1));
}

/* Fills (salt >= 0) or checks the block; returns the number of wrong elements. */
static int64_t visit(Side *side, int32_t salt, int check) {
  int64_t wrong = 0;
  for (int i = 0; i < side->rows; ++i) {
    for (int j = 0; j < side->columns; ++j) {
      const uint64_t index = (uint64_t)(side->row + i) * (uint64_t)columns + (uint64_t)(side->column + j);
      const int32_t value = (int32_t)(uint32_t)(index + (uint64_t)salt);
      int32_t *at = &side->data[(size_t)i * (size_t)side->columns + (size_t)j];
      if (check)
        wrong += *at != value;
      else
        *at = value;
    }
  }
  return wrong;
}

/* Seconds that the machine's cores have worked, and that they had. */
static void cores(double *worked, double *had) {
  unsigned long long f[8] = {0};
  FILE *file = fopen("/proc/stat", "r");
  if (!file || fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &f[0], &f[1], &f[2], &f[3], &f[4], &f[5],
                      &f[6], &f[7]) != 8)
    fail("cannot read /proc/stat");
  fclose(file);
  *had = 0;
  for (int i = 0; i < 8; ++i) *had += (double)f[i];
  *worked = *had - (double)(f[3] + f[4]);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (argc != 4) fail("usage: scalapack_reshard PROBLEM REPEATS SLOW");
  FILE *file = fopen(argv[1], "r");
  if (!file || fscanf(file, "%d %d", &rows, &columns) != 2) fail("cannot read the problem");
  Side source, target;
  read_side(file, &source);
  read_side(file, &target);
  fclose(file);
  int all, *everybody = malloc(sizeof(int) * (size_t)world);
  for (int i = 0; i < world; ++i) everybody[i] = i;
  Cblacs_get(0, 0, &all);
  Cblacs_gridmap(&all, everybody, 1, 1, world);

  const double slow = atof(argv[3]);
  int repeats = atoi(argv[2]), first = 1; /* of the rounds that count */
  int64_t wrong = 0;
  double *seconds = calloc((size_t)repeats + 1, sizeof(double)), *busy = calloc((size_t)repeats + 1, sizeof(double));
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    visit(&source, repeat, 0);
    memset(target.data, 0xFF, sizeof(int32_t) * (size_t)target.rows * (size_t)target.columns);
    double worked, had, worked_after, had_after;
    MPI_Barrier(MPI_COMM_WORLD);
    cores(&worked, &had);
    const double start = MPI_Wtime();
    Cpigemr2d(columns, rows, source.data, 1, 1, source.description, target.data, 1, 1, target.description, all);
    const double taken = MPI_Wtime() - start; /* the slowest rank counts */
    MPI_Allreduce(&taken, &seconds[repeat], 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    cores(&worked_after, &had_after);
    busy[repeat] = had_after > had ? (worked_after - worked) / (had_after - had) : 0;
    wrong += visit(&target, repeat, 1);
    if (repeat == 0 && seconds[0] > slow) repeats = first = 0; /* the same on all ranks */
  }
  int64_t total = 0;
  MPI_Reduce(&wrong, &total, 1, MPI_INT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    printf("{\"seconds\": [");
    for (int i = first; i <= repeats; ++i) printf("%s%.6f", i > first ? ", " : "", seconds[i]);
    printf("], \"busy\": [");
    for (int i = first; i <= repeats; ++i) printf("%s%.3f", i > first ? ", " : "", busy[i]);
    printf("], \"wrong_elements\": %ld}\n", total);
    fflush(stdout);
  }
  MPI_Finalize();
  return 0;
}
