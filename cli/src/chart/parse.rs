//! Templates as trees.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};

use super::lex::{self, Part, Token};

/// Templates by name.
pub(super) type Templates = BTreeMap<String, Vec<Node>>;
/// Deepest nesting of blocks and parentheses; charts have a handful.
const DEEPEST: usize = 64;

/// A part of a template.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    Text(String),
    Print(Pipeline),
    If { condition: Pipeline, then: Vec<Node>, otherwise: Vec<Node> },
    With { value: Pipeline, then: Vec<Node>, otherwise: Vec<Node> },
    Range { key: Option<String>, value: Option<String>, over: Pipeline, each: Vec<Node>, otherwise: Vec<Node> },
}

/// Commands, each of which gets the value of the one before as its last argument.
#[derive(Debug, PartialEq)]
pub(super) struct Pipeline {
    pub(super) variable: Option<Variable>,
    pub(super) commands: Vec<Expression>,
}

/// The variable that a pipeline sets.
#[derive(Debug, PartialEq)]
pub(super) struct Variable {
    pub(super) name: String,
    /// Whether it is a new one.
    pub(super) declared: bool,
}

#[derive(Debug, PartialEq)]
pub(super) enum Expression {
    Dot,
    Nil,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Variable(String),
    Field(Box<Expression>, String),
    Pipeline(Box<Pipeline>),
    Call(String, Vec<Expression>),
    /// `.Files.Get`, the one method that charts here use.
    Method(Box<Expression>, String, Vec<Expression>),
}

/// Reads a file; its own text is the template `name`.
///
/// # Errors
/// When it is not a template; the error contains the file's name.
pub(super) fn file(name: &str, source: &str, templates: &mut Templates) -> Result<()> {
    let read = || {
        let mut parser = Parser { parts: lex::parts(source)?.into_iter(), templates: BTreeMap::new(), depth: 0 };
        let (nodes, end) = parser.block()?;
        if let Some(end) = end {
            bail!("{} without a beginning", end.0);
        }
        anyhow::Ok((nodes, parser.templates))
    };
    let (nodes, defined) = read().with_context(|| name.to_owned())?;
    templates.extend(defined);
    templates.insert(name.to_owned(), nodes);
    Ok(())
}

struct Parser {
    parts: std::vec::IntoIter<Part>,
    templates: Templates,
    depth: usize,
}

/// What ends a block: `end` or `else`, with the words behind it.
type End = Option<(&'static str, Vec<Token>)>;

impl Parser {
    fn block(&mut self) -> Result<(Vec<Node>, End)> {
        self.depth += 1;
        if self.depth > DEEPEST {
            bail!("blocks are nested more than {DEEPEST} deep");
        }
        let mut nodes = Vec::new();
        while let Some(part) = self.parts.next() {
            let mut tokens = match part {
                Part::Text(text) => {
                    nodes.push(Node::Text(text));
                    continue;
                }
                Part::Action(tokens) => tokens,
            };
            let keyword = match tokens.first() {
                Some(Token::Word(word)) => word.clone(),
                _ => String::new(),
            };
            let behind = |tokens: &mut Vec<Token>| tokens.split_off(1);
            match keyword.as_str() {
                "end" => {
                    self.depth -= 1;
                    return Ok((nodes, Some(("end", behind(&mut tokens)))));
                }
                "else" => {
                    self.depth -= 1;
                    return Ok((nodes, Some(("else", behind(&mut tokens)))));
                }
                "if" | "with" | "range" => nodes.push(self.branch(&keyword, behind(&mut tokens))?),
                "define" => {
                    let [Token::Text(name)] = &tokens[1..] else { bail!("define needs a name in quotes") };
                    let name = name.clone();
                    let (body, end) = self.block()?;
                    if !matches!(end, Some(("end", _))) {
                        bail!("define {name:?} does not end");
                    }
                    self.templates.insert(name, body);
                }
                "block" | "break" | "continue" | "template" => bail!("{keyword} is not supported"),
                _ => nodes.push(Node::Print(pipeline(tokens)?)),
            }
        }
        self.depth -= 1;
        Ok((nodes, None))
    }

    fn branch(&mut self, keyword: &str, tokens: Vec<Token>) -> Result<Node> {
        let (then, end) = self.block()?;
        let otherwise = match end {
            Some(("end", _)) => Vec::new(),
            Some((_, more)) if more.is_empty() => match self.block()? {
                (nodes, Some(("end", _))) => nodes,
                _ => bail!("{keyword} ... else does not end"),
            },
            // `else if`: the end of the inner one is the end of this one.
            Some((_, mut more)) => match more.remove(0) {
                Token::Word(word) if word == "if" || word == "with" => vec![self.branch(&word, more)?],
                _ => bail!("unexpected words after else"),
            },
            None => bail!("{keyword} does not end"),
        };
        Ok(match keyword {
            "if" => Node::If { condition: pipeline(tokens)?, then, otherwise },
            "with" => Node::With { value: pipeline(tokens)?, then, otherwise },
            _ => {
                let (key, value, over) = range(tokens)?;
                Node::Range { key, value, over, each: then, otherwise }
            }
        })
    }
}

/// `range $key, $value := ...`, `range $value := ...` or `range ...`.
fn range(mut tokens: Vec<Token>) -> Result<(Option<String>, Option<String>, Pipeline)> {
    let (key, value, words) = match tokens.as_slice() {
        [Token::Variable(key), Token::Comma, Token::Variable(value), Token::Declare, ..] => {
            (Some(key.clone()), Some(value.clone()), 4)
        }
        [Token::Variable(value), Token::Declare, ..] => (None, Some(value.clone()), 2),
        _ => (None, None, 0),
    };
    Ok((key, value, pipeline(tokens.split_off(words))?))
}

fn pipeline(tokens: Vec<Token>) -> Result<Pipeline> {
    let mut words = Words { tokens: tokens.into_iter().peekable(), depth: 0 };
    let pipeline = words.pipeline()?;
    match words.tokens.next() {
        None => Ok(pipeline),
        Some(token) => bail!("unexpected {token:?}"),
    }
}

struct Words {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    depth: usize,
}

impl Words {
    fn pipeline(&mut self) -> Result<Pipeline> {
        self.depth += 1;
        if self.depth > DEEPEST {
            bail!("parentheses are nested more than {DEEPEST} deep");
        }
        let mut variable = None;
        if let Some(Token::Variable(name)) = self.tokens.peek().cloned() {
            let mut ahead = self.tokens.clone();
            ahead.next();
            if let Some(sign @ (Token::Declare | Token::Assign)) = ahead.next() {
                variable = Some(Variable { name, declared: sign == Token::Declare });
                self.tokens = ahead;
            }
        }
        let mut commands = vec![self.command()?];
        while self.tokens.next_if_eq(&Token::Pipe).is_some() {
            commands.push(self.command()?);
        }
        self.depth -= 1;
        Ok(Pipeline { variable, commands })
    }

    fn command(&mut self) -> Result<Expression> {
        let first = self.operand()?;
        let mut arguments = Vec::new();
        while !matches!(self.tokens.peek(), None | Some(Token::Pipe | Token::Close)) {
            arguments.push(self.operand()?);
        }
        Ok(match first {
            Expression::Call(name, _) => Expression::Call(name, arguments),
            first if arguments.is_empty() => first,
            Expression::Field(of, name) => Expression::Method(of, name, arguments),
            _ => bail!("arguments are given to something that is not a function"),
        })
    }

    fn operand(&mut self) -> Result<Expression> {
        let mut found = match self.tokens.next().context("an empty pipeline")? {
            Token::Dot => Expression::Dot,
            Token::Field { name, .. } => Expression::Field(Box::new(Expression::Dot), name),
            Token::Variable(name) => Expression::Variable(name),
            Token::Text(text) => Expression::Text(text),
            Token::Int(number) => Expression::Int(number),
            Token::Float(number) => Expression::Float(number),
            Token::Word(word) => match word.as_str() {
                "true" => Expression::Bool(true),
                "false" => Expression::Bool(false),
                "nil" => Expression::Nil,
                _ => Expression::Call(word, Vec::new()),
            },
            Token::Open => {
                let inner = self.pipeline()?;
                if self.tokens.next() != Some(Token::Close) {
                    bail!("a parenthesis is not closed");
                }
                Expression::Pipeline(Box::new(inner))
            }
            token => bail!("unexpected {token:?}"),
        };
        while let Some(Token::Field { glued: true, .. }) = self.tokens.peek() {
            if let Some(Token::Field { name, .. }) = self.tokens.next() {
                found = Expression::Field(Box::new(found), name);
            }
        }
        Ok(found)
    }
}
